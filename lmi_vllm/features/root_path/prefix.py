"""A prefix that a proxy leaves in front of paths: `option.root_path`, as vLLM's `--root-path`.

Requests with the prefix and without it mean the same, so that the server may be asked directly. It
is taken away before a route is looked for: no route, limit or log line knows of it.

`explain` reads the settings here; it has no use for aiohttp, which is imported with a prefix only.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import option, ours
from lmi_vllm.config.settings import FeatureSettings, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from lmi_vllm.web.request import PathPrefix
    from lmi_vllm.web.rerouting import MakeRequest

_LOCATION: Final = "Location"


class RootPathSettings(FeatureSettings):
    """One option of the model's."""

    section: ClassVar[str] = "Requests and replies"

    root_path: str | None = option(
        parse.plain_text,
        ours(),
        values="prefix",
        note="Path prefix that a proxy leaves in front. Paths without it are answered, too.",
    )


def path_prefix(settings: Settings) -> "PathPrefix | None":
    """Return what takes the prefix away; None where there is none."""
    root_path = root_path_of(settings.feature(RootPathSettings).root_path)
    return below(root_path) if root_path else None


def root_path_of(text: str | None) -> str:
    """Return the prefix with a slash before it and none behind; empty where there is none."""
    name = (text or "").strip("/")
    return f"/{name}" if name else ""


def below(root_path: str) -> "PathPrefix":
    """Return what lets an application know only paths without the prefix."""
    from aiohttp import web  # noqa: PLC0415 - see above

    prefixed = web.RequestKey("prefixed", bool)

    async def keep_in_redirects(request: web.Request, response: web.StreamResponse) -> None:
        location = response.headers.get(_LOCATION, "")
        if request.get(prefixed) and location.startswith("/"):
            response.headers[_LOCATION] = f"{root_path}{location}"

    def prepare(app: web.Application, inner_socket: str) -> "Callable[[MakeRequest], MakeRequest]":
        app.on_response_prepare.append(keep_in_redirects)
        return lambda make: _without_prefix(root_path, make, inner_socket, prefixed)

    return prepare


def _without_prefix(
    root_path: str, make_request: "MakeRequest", inner_socket: str, prefixed: "web.RequestKey[bool]"
) -> "MakeRequest":
    """Return what makes requests out of messages as `make_request` does, without the prefix.

    What comes over `inner_socket` has lost it before, in another process of this server.
    """
    from lmi_vllm.web.rerouting import target_url  # noqa: PLC0415 - see above

    def made(message: Any, payload: Any, protocol: Any, *rest: Any) -> "web.BaseRequest":
        rest = (payload, protocol, *rest)
        if not message.path.startswith(root_path) or _came_over(inner_socket, protocol.transport):
            return make_request(message, *rest)
        path = message.path[len(root_path) :]
        if path and path[0] not in "/?":  # a longer word
            return make_request(message, *rest)
        path = path if path.startswith("/") else f"/{path}"
        request = make_request(message._replace(path=path, url=target_url(path)), *rest)
        request[prefixed] = True
        return request

    return made


def _came_over(inner_socket: str, transport: Any) -> bool:
    if not inner_socket or transport is None:
        return False
    return bool(transport.get_extra_info("sockname") == inner_socket)
