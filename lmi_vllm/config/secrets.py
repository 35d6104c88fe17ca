"""The one rule that keeps secrets out of logs, `explain` and errors."""

import re
from collections.abc import Mapping
from typing import Final

MASK: Final = "***"
_SECRET_WORDS: Final = frozenset(
    {"token", "secret", "key", "pass", "password", "credentials"}
    | {"credential", "passwd", "apikey", "authtoken"}  # as other tools spell them
)
_OF_THE_MODEL: Final = re.compile(
    r"per_token$|_token_threshold|adapter_token$|_token_ids$|token_lane$|header_key$"
)
_URL_LOGIN: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/@\s\"']+@")
_URL_SIGNATURE: Final = re.compile(
    r"([?&](?:x-amz-signature|x-amz-credential|x-amz-security-token|signature|sig|token|"
    r"awsaccesskeyid|key|api_key|access_token)=)[^&\s\"']+",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether `name` has a secret's word as a whole word (`hf_token`, not `max_tokens`).

    `..._per_token`, `..._token_threshold` and `max_...` refer to the model's tokens,
    `..._header_key` of a header's name.
    """
    if _OF_THE_MODEL.search(name.lower()):
        return False
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^A-Za-z0-9]+", name.lower()))


def mask_urls(text: str) -> str:
    """`text` with logins and signatures in URLs hidden."""
    if "://" in text:  # every line of the log is checked, and few have a URL
        text = _URL_LOGIN.sub(rf"\1{MASK}@", text)
    return _URL_SIGNATURE.sub(rf"\1{MASK}", text) if "?" in text or "&" in text else text


def mask_value(name: str, value: object) -> object:
    """`value` as it may be shown under `name`, nested values included."""
    if value is None or isinstance(value, bool):
        return value
    if is_secret(name):
        return MASK
    if isinstance(value, str):  # JSON that cannot be read stays text
        return mask_urls(_mask_members(value))
    if isinstance(value, Mapping):
        return {str(key): mask_value(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_value(name, item) for item in value]
    return value


def mask_text(name: str, text: str) -> str:
    """The `text` of a setting as it may be shown under `name`."""
    if is_secret(name):
        return MASK
    if name == "env":
        return ",".join(_mask_pair(pair) for pair in text.split(","))
    return mask_urls(_mask_members(text))


def _mask_members(text: str) -> str:
    """`text` with JSON members of secret names hidden, even if it is no valid JSON."""
    return re.sub(
        r"(\"([A-Za-z0-9_.-]+)\"\s*:\s*)\"(?:[^\"\\]|\\.)*\"?",
        lambda match: f'{match[1]}"{MASK}"' if is_secret(match[2]) else match[0],
        text,
    )


def _mask_pair(pair: str) -> str:
    """One NAME=value of `option.env`, hidden if the name is secret."""
    name, separator, value = pair.partition("=")
    return f"{name}{separator}{MASK if is_secret(name.strip()) else mask_urls(value)}"
