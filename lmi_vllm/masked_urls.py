"""Texts as they may be shown: no logins or signatures of URLs, and no whole field of a request."""

import re
from typing import Final

MASK: Final = "***"
MOST_SHOWN: Final = 8 << 10  # characters of an answer; looking for logins in 20 MB takes a minute
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


def shown(text: str, most: int = MOST_SHOWN) -> str:
    """The text of an error, which may repeat a field of any size: masked, without its middle."""
    if len(text) <= most:
        return mask_urls(text)
    tail = most // 4
    head = most - tail
    left_out = len(text) - most
    # What is masked may begin before the tail.
    end = mask_urls(text[-2 * tail :])[-tail:]
    return f"{mask_urls(text[:head])} ... ({left_out} characters are left out) ... {end}"
