"""URLs as they may be shown: without logins and signatures."""

import re
from typing import Final

MASK: Final = "***"
_ANSWERED: Final = 8 << 10  # characters of an answer: looking for logins in more takes too long
# Up to the last @ before the path; or over a slash in a password (the bound keeps long lines fast),
# where what follows the colon is no port.
_URL_LOGIN: Final = re.compile(
    r"""(?<!abfs)(?<!abfss)://(?:[^/\s"']+@|[^/@:\[\s"']*:(?!\d{1,5}/)[^\s"']{1,500}@)"""
)
_URL_SIGNATURE: Final = re.compile(
    r"([?&](?:x-[a-z]{2,9}-(?:signature|credential|security-token)|signature|sig|token|"
    r"awsaccesskeyid|key|api_key|apikey|access_token|password|secret)=)[^&\s\"']+",
    re.IGNORECASE,
)


def mask_urls(text: str) -> str:
    """`text` with logins and signatures in URLs hidden."""
    if "://" in text:  # every line of the log is checked, and few have a URL
        text = _URL_LOGIN.sub(f"://{MASK}@", text)
    return _URL_SIGNATURE.sub(rf"\1{MASK}", text) if "?" in text or "&" in text else text


def mask_answer(text: str) -> str:
    """The text of an error, which may repeat much of a request, with URLs at its begin masked."""
    return mask_urls(text[:_ANSWERED]) + text[_ANSWERED:]
