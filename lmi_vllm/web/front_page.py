"""`/`: a short page for people, who followed the URL that the start printed."""

from html import escape

from aiohttp import web

from lmi_vllm._version import __version__
from lmi_vllm.errors import ResourceNotFoundError
from lmi_vllm.web.request import GROUPS, SERVICE

# What is there without any extra.
_PAGES = {"/ping": "whether the model answers", "/models": "the model", "/metrics": "Prometheus"}
_HEADERS = {"Content-Security-Policy": "default-src 'none'", "X-Content-Type-Options": "nosniff"}


def add_front_page(app: web.Application) -> None:
    """Register it; an extra that came before may have the path, and asks `front_page` itself."""
    app.router.add_route("*", "/", front_page)


async def front_page(request: web.Request) -> web.Response:
    """Answer with what there is to look at, `OPTIONS` with nothing; other methods are not found.

    Nothing of it is more than `/ping` says to anyone.
    """
    if request.method == "OPTIONS":
        return web.Response(body=b"{}\n", content_type="application/json")
    if request.method not in ("GET", "HEAD"):
        raise ResourceNotFoundError
    lifecycle = request.app[SERVICE].lifecycle
    pages = {path: text for group in request.app[GROUPS] for path, text in group.pages.items()}
    there = {route.resource.canonical for route in request.app.router.routes() if route.resource}
    links = "".join(
        f'<li><a href="{path}">{path}</a> {escape(text)}</li>'
        for path, text in (pages | _PAGES).items()
        if path in there
    )
    state = f"{lifecycle.model_name}: {lifecycle.state}" if lifecycle.has_model else "no model"
    head = f"<!doctype html><meta charset=utf-8><title>lmi_vllm</title><h1>lmi_vllm {__version__}"
    text = f"{head}</h1><p>{escape(state)}</p><ul>{links}</ul>\n"
    return web.Response(text=text, content_type="text/html", headers=_HEADERS)
