"""Requests from pages of other sites, and the CORS headers as configured.

Any page can post a form to 127.0.0.1, and a foreign DNS server can map its own name to this machine
(DNS rebinding). Browsers say where a request comes from (`Sec-Fetch-Site`), which is checked. Other
clients do not send that header and are not affected. One CORS origin, or `*`, is sent with every
answer, as in LMI. With several origins, the answer names the one that asks. A page of another site
gets no header, which its browser takes as a refusal.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from aiohttp import web

from lmi_vllm.errors import CrossSiteError

PREFLIGHT_SECONDS: Final = "600"  # seconds until a browser asks again, as in vLLM
_OWN_SITE: Final = ("same-origin", "none")
_READING: Final = ("GET", "HEAD", "OPTIONS")
_ORIGIN: Final = "Access-Control-Allow-Origin"
_ASKED_HEADERS: Final = "Access-Control-Request-Headers"
_ALLOWED_HEADERS: Final = "Access-Control-Allow-Headers"

# Caches keep an answer for each origin.
_ORIGIN_REFUSED: Final[Mapping[str, str]] = MappingProxyType({"Vary": "Origin"})


def is_preflight(request: web.Request) -> bool:
    """Whether the request is a browser's preflight, which never has credentials."""
    asks = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    return request.method == "OPTIONS" and asks


def preflight_answer(request: web.Request, configured: Mapping[str, str]) -> web.Response:
    """Allow the requested headers, unless the configuration has a list."""
    response = web.Response(body=b"{}\n", content_type="application/json")
    if _ORIGIN not in cors_headers(request, configured):
        return response
    response.headers["Access-Control-Max-Age"] = PREFLIGHT_SECONDS
    asked = request.headers.get(_ASKED_HEADERS)
    if asked is not None and _ALLOWED_HEADERS not in configured:
        response.headers[_ALLOWED_HEADERS] = asked
    return response


def is_origin_allowed(request: web.Request, configured: Mapping[str, str]) -> bool:
    """Whether the origin may send changing requests: it is configured."""
    return bool(configured) and cors_headers(request, configured) is not _ORIGIN_REFUSED


def cors_headers(request: web.Request, configured: Mapping[str, str]) -> Mapping[str, str]:
    """Return the CORS headers of an answer; none for a page of a site that is not allowed."""
    origins = [origin.strip() for origin in configured.get(_ORIGIN, "").split(",")]
    if len(origins) == 1:
        return configured
    if "*" in origins:
        return {**configured, _ORIGIN: "*"}
    asking = request.headers.get("Origin", "")
    if asking not in origins:
        return _ORIGIN_REFUSED
    return {**configured, _ORIGIN: asking, "Vary": "Origin"}


def check_same_site(request: web.Request, *, allows_cors: bool) -> None:
    """Check that another site's page sends no request that changes something.

    Raises:
        CrossSiteError: it does, and no CORS setting invites other sites.
    """
    if not allows_cors and request.method not in _READING and is_cross_site(request):
        raise CrossSiteError(
            "the request comes from another web site (Sec-Fetch-Site: "
            f"{request.headers['Sec-Fetch-Site']}); cors_allowed_origin allows such sites"
        )


def is_cross_site(request: web.Request) -> bool:
    """Whether a browser says that a page of another site sends this."""
    return request.headers.get("Sec-Fetch-Site", "none") not in _OWN_SITE
