"""`route=` in SageMaker's custom attributes: `/invocations` reaches the server's other routes.

SageMaker passes requests to one path only. As in AWS's image of vLLM a request names the route that
it is for, and is that route's from its first line on: the same key, queue, adapters, errors and
metrics. Only routes of inference are reached so.
"""

import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

from aiohttp import web
from yarl import URL

MakeRequest = Callable[..., web.BaseRequest]
CUSTOM_ATTRIBUTES: Final = "x-amzn-sagemaker-custom-attributes"
# The target that a rerouted request was sent to.
ORIGINAL: Final = web.RequestKey("original", str)
_SOURCE: Final = "/invocations"
# AWS's image separates attributes by commas, LMI by semicolons.
_ROUTE: Final = re.compile(r"(?:^|[,;])\s*route\s*=\s*(/[^\s,;]*)", re.IGNORECASE)
_WITH_SLASH: Final = re.compile(r"(/(?:ping|invocations|predictions/[^/?#]+))/((?:\?.*)?)")
_KEPT: Final = "/%:@!$&'()*+=~"  # characters of a path; others are no part of a route of ours


def without_route(attributes: str) -> str:
    """Return custom attributes without the one that names a route."""
    return _ROUTE.sub("", attributes).lstrip(" ,;") if "route" in attributes.lower() else attributes


def without_last_slash(message: Any) -> Any:
    """Return the message of a request for one of LMI's paths without a slash behind it.

    LMI answers both, and vLLM redirects (InferenceRequestHandler.java; FastAPI's default). Clients
    of SageMaker cannot follow.
    """
    match = _WITH_SLASH.fullmatch(message.path)
    if match is None:
        return message
    target = f"{match[1]}{match[2]}"
    return message._replace(path=target, url=target_url(target))


def rerouted(make_request: MakeRequest, message: Any, *rest: Any) -> web.BaseRequest:
    """Return the request of a message with custom attributes, for the route named in them."""
    path, _, query = message.path.partition("?")
    found = _ROUTE.search(";".join(message.headers.getall(CUSTOM_ATTRIBUTES)))
    if found is None or path != _SOURCE or message.method != "POST":
        return make_request(message, *rest)
    route = quote(found[1], safe=_KEPT, errors="replace")
    route = route.removesuffix("/") or route  # SageMaker's clients cannot follow a redirect
    target = f"{route}?{query}" if query else route
    request = make_request(message._replace(path=target, url=target_url(target)), *rest)
    request[ORIGINAL] = message.path
    return request


def target_url(target: str) -> URL:
    """Return the target of a request as aiohttp reads it: two slashes at first are no host."""
    path, _, fragment = target.partition("#")
    path, _, query = path.partition("?")
    return URL.build(path=path, query_string=query, fragment=fragment, encoded=True)
