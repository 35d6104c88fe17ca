"""Which requests are let in: with a key, with a method the route has, and not by another site.

A page anywhere can post a form to 127.0.0.1, and a stranger's DNS server can make its own name mean
this machine. Browsers say where a request comes from (`Sec-Fetch-Site`); other clients do not send
that header and are not touched.
"""

import hmac
import ipaddress
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from lmi_vllm.errors import CrossSiteError, ExpectationError, MethodNotAllowedError

_OWN_SITE: Final = ("same-origin", "none")
_READING: Final = ("GET", "HEAD", "OPTIONS")
CONTINUE: Final = "100-continue"


def has_key(request: web.Request, keys: Iterable[str]) -> bool:
    """Whether the request brings one of `keys`, as a bearer token or in x-api-key."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = [request.headers.get("x-api-key", "")]
    if scheme.lower() == "bearer":
        given.append(token.strip())
    is_known = False
    for text in given:
        shown = text.encode("utf-8", "surrogateescape")
        for key in keys:  # all of them, in full: the time taken says nothing about any
            is_known |= hmac.compare_digest(shown, key.encode())
    return is_known


def check_method(request: web.Request, methods: Iterable[str]) -> None:
    """Return when the request's method is one of those that its route has.

    Raises:
        MethodNotAllowedError: it is not; the answer's `Allow` names those.
    """
    if request.method not in methods:
        raise MethodNotAllowedError(allowed=sorted(methods))


def check_expectation(request: web.Request) -> None:
    """Return unless the client expects what this server does not do.

    Raises:
        ExpectationError: it expects something else than 100-continue.
    """
    if request.headers.get("Expect", CONTINUE).lower() != CONTINUE:
        raise ExpectationError("Expect: only 100-continue is supported")


def is_preflight(request: web.Request) -> bool:
    """Whether a browser asks what it may send: it does so without credentials, always."""
    asks = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    return request.method == "OPTIONS" and asks


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
