"""Requests from pages of other sites, and the CORS headers as configured.

Any page can post a form to 127.0.0.1, and a foreign DNS server can map its own name to this machine
(DNS rebinding). Browsers say where a request comes from (`Sec-Fetch-Site`, else `Origin`), which is
checked. Other clients send neither and are not affected. One CORS origin, or `*`, is sent with
every answer, as in LMI. With several origins, the answer names the one that asks. A page of another
site gets no header, which its browser takes as a refusal.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from lmi_vllm.errors import CrossSiteError

PREFLIGHT_SECONDS: Final = "600"  # seconds until a browser asks again, as in vLLM
_OWN_SITE: Final = ("same-origin", "none")
_READING: Final = ("GET", "HEAD", "OPTIONS")
_FORWARDED_HOST: Final = "X-Forwarded-Host"
_ORIGIN: Final = "Access-Control-Allow-Origin"
_ASKED_HEADERS: Final = "Access-Control-Request-Headers"
_ALLOWED_HEADERS: Final = "Access-Control-Allow-Headers"

# Else a page cannot read the token of a deferred answer, or the id of a session.
_EXPOSED: Final[Mapping[str, str]] = MappingProxyType({"Access-Control-Expose-Headers": "*"})
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
        return {**configured, **_EXPOSED}
    if "*" in origins:
        return {**configured, **_EXPOSED, _ORIGIN: "*"}
    asking = request.headers.get("Origin", "")
    if asking not in origins:
        return _ORIGIN_REFUSED
    return {**configured, **_EXPOSED, _ORIGIN: asking, "Vary": "Origin"}


def check_same_site(request: web.Request, *, allows_cors: bool) -> None:
    """Check that another site's page sends no request that changes something.

    Raises:
        CrossSiteError: it does, and no CORS setting invites other sites.
    """
    if not allows_cors and request.method not in _READING and is_cross_site(request):
        raise CrossSiteError(
            f"the request comes from another web site ({_said(request)}); cors_allowed_origin "
            "allows such sites"
        )


def is_cross_site(request: web.Request) -> bool:
    """Whether a browser says that a page of another site sends this.

    To an http address that is not loopback browsers send no `Sec-Fetch-Site`, but `Origin`. A proxy
    may have replaced the host. Pages of other sites cannot send its own header of it unasked.
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None or origin is None:
        return site is not None and site not in _OWN_SITE
    hosts = {_host(f"//{request.headers.get(name, '')}") for name in ("Host", _FORWARDED_HOST)}
    return _host(origin) not in hosts - {""}


def _host(url: str) -> str:
    """Return host and port of a URL, without a default port; empty if it has none."""
    try:
        return re.sub(r":(80|443)$", "", urlsplit(url).netloc.rpartition("@")[2].lower())
    except ValueError:
        return ""


def _said(request: web.Request) -> str:
    names = ("Sec-Fetch-Site", "Origin")
    name = next(name for name in names if name in request.headers)
    return f"{name}: {request.headers[name]:.200}"
