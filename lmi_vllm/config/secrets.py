"""The one rule that keeps secrets out of logs, `explain` and errors."""

import re
from collections.abc import Mapping
from typing import Final

from lmi_vllm.masked_urls import MASK, mask_urls

__all__ = ["MASK", "is_secret", "mask_text", "mask_urls", "mask_value"]

_SECRET_WORDS: Final = frozenset(
    {"token", "secret", "key", "pass", "password", "credentials"}
    | {"credential", "passwd", "apikey", "authtoken"}  # as other tools spell them
    | {"keys", "secrets", "passwords", "apikeys"}
)
_OF_THE_MODEL: Final = re.compile(
    r"(?:^|_)per_token(?:$|_)|_token_(?:threshold|ids?$|index$|prob$|budgets$|dropout$)|"
    r"max_token_num$|adapter_token$|token_lane$|header_key$|^pass_config$|"
    r"(?:^|_)key_(?:value_(?:attention_)?(?:heads|groups)|heads?|dim|multiplier)(?:$|_)|_file$"
)
# The name of a JSON member and its colon; without quotes, too, as in what people type.
_MEMBER: Final = re.compile(
    r"""(?:(?P<quote>["'])(?P<quoted>[^"'\\]{1,100})(?P=quote)|[{,]\s*(?P<bare>[\w.-]{1,100}))\s*:\s*"""
)
_STRING: Final = r"""(?:"(?:[^"\\]|\\.)*(?:"|$)|'(?:[^'\\]|\\.)*(?:'|$))"""
_PART_OF_VALUE: Final = re.compile(rf"{_STRING}|[\[\]{{}}]", re.DOTALL)
# A text with what follows it by mistake, or a number and other text without quotes.
_PLAIN_VALUE: Final = re.compile(
    rf"(?!(?:true|false|null)\b)(?:{_STRING}[^,}}\]]*|(?:(?!,\s*[\"'])[^}}\]\n])+)", re.DOTALL
)


def is_secret(name: str) -> bool:
    """Whether `name` has a secret's word as a whole word (`hf_token`, not `max_tokens`).

    Some names have the word and are of the model: `..._per_token`, `pad_token_id`,
    `num_key_value_heads`. `..._header_key` is the name of a header, `..._file` a path.
    """
    if _OF_THE_MODEL.search(name.lower()):
        return False
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^A-Za-z0-9]+", name.lower()))


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
        return _mask_pairs(_mask_members(text))
    return mask_urls(_mask_members(text))


def _mask_members(text: str) -> str:
    """`text` with JSON members of secret names hidden, even if it is no valid JSON."""
    parts, position = [], 0
    while match := _MEMBER.search(text, position):
        parts.append(text[position : match.end()])
        position = match.end()
        is_hidden = is_secret(match["quoted"] or match["bare"])
        end = _end_of_value(text, position) if is_hidden else position
        if end > position:
            parts.append(f'"{MASK}"')
            position = end
    return "".join([*parts, text[position:]])


def _end_of_value(text: str, start: int) -> int:
    """Where the JSON value at `start` ends; at `start` for one that may be shown.

    A list or an object that is never closed goes to the end of the text.
    """
    depth = 0
    for match in _PART_OF_VALUE.finditer(text, start) if text[start : start + 1] in "[{" else ():
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    if depth:
        return len(text)
    found = _PLAIN_VALUE.match(text, start)
    return found.end() if found else start


def _mask_pairs(text: str) -> str:
    """The pairs of `option.env`, those of secret names hidden.

    A part without a name is what follows a comma in the value before it.
    """
    pairs, is_hidden = [], False
    for part in text.split(","):
        name, separator, value = part.partition("=")
        if separator:
            is_hidden = is_secret(name.strip())
            pairs.append(f"{name}={MASK if is_hidden else mask_urls(value)}")
        else:
            pairs.append(MASK if is_hidden else mask_urls(part))
    return ",".join(pairs)
