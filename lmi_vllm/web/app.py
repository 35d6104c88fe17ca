"""`create_app`: the HTTP application over an inference service, and its options."""

from aiohttp import web

from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.connection import WriteBatch
from lmi_vllm.web.engine_routes import add_list_of_models, add_openai_routes
from lmi_vllm.web.inference_routes import add_health_routes, add_inference_routes
from lmi_vllm.web.management_routes import add_front_page, add_management_routes
from lmi_vllm.web.middleware import Router, add_headers, request_middleware
from lmi_vllm.web.request import (
    GROUPS,
    OPTIONS,
    SERVICE,
    WRITE_BATCH,
    Routes,
    WebOptions,
    rerouting,
)


def create_app(service: InferenceService, options: WebOptions | None = None) -> web.Application:
    """Return the application over `service`, whose engine may not have started yet."""
    options = options or WebOptions()
    app = web.Application(
        middlewares=[request_middleware(service, options)], client_max_size=options.max_request_size
    )
    app._router = Router(service)
    app._make_request = rerouting(app._make_request)  # type: ignore[assignment,method-assign]
    app[SERVICE] = service
    app[OPTIONS] = options
    app[WRITE_BATCH] = WriteBatch()
    app.on_response_prepare.append(add_headers)
    _add_routes(app)
    return app


def _add_routes(app: web.Application) -> None:
    """Register every configured route: inference, then features' routes."""
    options = app[OPTIONS]
    app[GROUPS] = options.groups
    add_health_routes(app)
    if options.routes is not Routes.MANAGEMENT:
        add_inference_routes(app)
    for group in app[GROUPS]:
        group.add(app)
    add_front_page(app)
    if options.routes is not Routes.MANAGEMENT:
        add_openai_routes(app)
    elif options.has_open_signals:
        add_list_of_models(app)
    if options.routes is not Routes.INFERENCE:
        add_management_routes(app)
