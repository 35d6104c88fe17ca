"""Which routes an application has: those of its listener, and the groups that extras bring."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from aiohttp import web

from lmi_vllm.errors import Dialect
from lmi_vllm.extension import extras
from lmi_vllm.web.adapter_routes import add_adapter_routes
from lmi_vllm.web.inference_routes import add_inference_routes
from lmi_vllm.web.keys import GROUPS, OPTIONS
from lmi_vllm.web.management_routes import add_management_routes
from lmi_vllm.web.model_routes import add_model_routes
from lmi_vllm.web.route_families import OPEN_PATHS, OPENAI_ROUTES
from lmi_vllm.web.tgi_routes import add_tgi_routes
from lmi_vllm.web.vllm_adapter_routes import add_vllm_adapter_routes


class Routes(StrEnum):
    """Which routes a listener has: all, or with a management address one half each."""

    ALL = "all"
    INFERENCE = "inference"
    MANAGEMENT = "management"


@dataclass(frozen=True, slots=True)
class RouteGroup:
    """Routes of an extra. Those below `prefix` have rules of their own, unless they are vLLM's.

    `is_open` says which of them need no key; `check` raises what refuses a request. `title` is
    printed with the URL when the server starts. Where there is an `error_body` it writes errors,
    with the statuses of `error_dialect`.
    """

    add: Callable[[web.Application], None]
    prefix: str = ""
    title: str = ""
    is_open: Callable[[str], bool] = lambda _: False
    check: Callable[[web.Request], None] = lambda _: None
    allows_cors: bool = False
    error_body: Callable[[str], bytes] | None = None
    error_dialect: Dialect = Dialect.SERVER

    def owns(self, path: str) -> bool:
        """Whether the rules of this group are those for `path`."""
        if not self.prefix or path in OPENAI_ROUTES:
            return False
        return path == self.prefix or path.startswith(self.prefix + "/")


def add_routes(app: web.Application) -> None:
    """Register every route that the application's options ask for."""
    options = app[OPTIONS]
    if options.routes is not Routes.MANAGEMENT:
        add_inference_routes(app)
        add_tgi_routes(app)
    if options.routes is not Routes.INFERENCE:
        add_management_routes(app)
        add_adapter_routes(app)
        add_model_routes(app)
        add_vllm_adapter_routes(app)
    app[GROUPS] = (*_groups_of_extras(), *options.groups)
    for group in app[GROUPS]:
        group.add(app)


def _groups_of_extras() -> Iterator[RouteGroup]:
    for extra in extras().values():
        for group in extra.routes:
            yield group.load()


def group_of(request: web.Request) -> RouteGroup | None:
    """Return the group whose rules are those for this path, if it is not one of the core's."""
    return next((group for group in request.app[GROUPS] if group.owns(request.path)), None)


def is_open(request: web.Request) -> bool:
    """Whether the path is answered without a key: health, and the open pages of groups."""
    group = group_of(request)
    return request.path in OPEN_PATHS or (group is not None and group.is_open(request.path))
