"""Requests that another web site makes a visitor's browser send; the server is not theirs to use.

A page anywhere can post a form to 127.0.0.1, and a stranger's DNS server can make its own name mean
this machine. Browsers say where a request comes from (`Sec-Fetch-Site`); other clients do not send
that header and are not touched.
"""

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from lmi_vllm.errors import CrossSiteError

_OWN_SITE: Final = ("same-origin", "none")
_READING: Final = ("GET", "HEAD", "OPTIONS")


def check_not_foreign(request: web.Request, *, allows_cors: bool) -> None:
    """Return unless another site asks for more than reading, which the browser keeps from it.

    Raises:
        CrossSiteError: it does, and no CORS setting invites other sites.
    """
    if not allows_cors and request.method not in _READING and is_foreign(request):
        raise CrossSiteError(
            "the request comes from another web site (Sec-Fetch-Site: "
            f"{request.headers['Sec-Fetch-Site']}); cors_allowed_origin allows such sites"
        )


def is_foreign(request: web.Request) -> bool:
    """Whether a browser says that the page of another site sends this."""
    return request.headers.get("Sec-Fetch-Site", "none") not in _OWN_SITE


def is_unforgeable_host(host: str) -> bool:
    """Whether a Host header cannot be another site's name: an IP address, or localhost."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
