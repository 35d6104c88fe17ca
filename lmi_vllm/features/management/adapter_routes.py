"""LMI's adapter API: register, list, describe, update and unregister adapters."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import BadParameterError, ResourceNotFoundError
from lmi_vllm.features.management.requests import given_arguments, page_answer
from lmi_vllm.inference.context import ADAPTER_ALIAS_HEADER
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.inference_routes import READ_METHODS, json_answer
from lmi_vllm.web.request import OPTIONS, SERVICE, RouteGroup, Routes, check_method

ADAPTER_FIELDS: Final = ("name", "src", "preload", "pin")
WAIT: Final = "wait"  # for every replica
FLAGS: Final = ("preload", "pin", WAIT)


def _add(app: web.Application) -> None:
    """Register the routes under both prefixes; methods are checked by the handlers."""
    if app[OPTIONS].routes is Routes.INFERENCE:
        return
    for prefix in ("/adapters", "/models/{model}/adapters"):
        app.router.add_route("*", prefix, adapters)
        # Without a pattern aiohttp finds no names with braces.
        app.router.add_route("*", prefix + "/{name:[^/]+}", one_adapter)
        app.router.add_route("*", prefix + "/{name:[^/]+}/{action}", adapter_action)


GROUP: Final = RouteGroup(_add)


async def adapters(request: web.Request) -> web.Response:
    """List adapters, or register one."""
    _check_model(request)
    check_method(request, (*READ_METHODS, "POST"))
    registry = adapter_registry(request)
    if request.method in READ_METHODS:
        listed = registry.numbered()
        shown = [_shown(item) for item in listed.values()]
        return page_answer("adapters", shown, request.query, list(listed))
    given = _with_flags(await given_arguments(request, ADAPTER_FIELDS))
    for name in ("name", "src"):
        if not given.get(name):
            raise BadParameterError(f"The parameter {name} is required")
        if not isinstance(given[name], str):
            raise BadParameterError(f"The parameter {name} must be text")
    adapter = Adapter(
        name=given["name"],
        src=given["src"],
        preload=given.get("preload", True),
        pin=given.get("pin", False),
        options=_options(given),
    )
    alias = _alias(request)
    await registry.refresh(adapter.name, is_searched=False)
    if registry.is_from_store(adapter.name):  # a call's own goes before what was found by its name
        await registry.replace(adapter, request.app[SERVICE].profile.predict_timeout)
    else:
        await registry.register(adapter, alias)
    return await _changed(registry, adapter.name, given, f"{alias or adapter.name} registered")


async def one_adapter(request: web.Request) -> web.Response:
    """Describe or unregister an adapter."""
    _check_model(request)
    check_method(request, (*READ_METHODS, "DELETE"))
    registry = adapter_registry(request)
    name, alias = request.match_info["name"], _alias(request)
    if request.method in READ_METHODS:
        return json_answer(_shown(registry.describe(name, alias)))
    given = _with_flags(request.query)
    await registry.remove(name, request.app[SERVICE].profile.predict_timeout, alias)
    return await _changed(registry, name, given, f"{alias or name} unregistered")


async def adapter_action(request: web.Request) -> web.Response:
    """Update an adapter: the one action there is."""
    _check_model(request)
    if request.match_info["action"].lower() != "update":
        raise ResourceNotFoundError
    check_method(request, ("POST",))
    registry = adapter_registry(request)
    name, alias = request.match_info["name"], _alias(request)
    await registry.refresh(name)
    registry.describe(name, alias)  # an unknown name is refused before its arguments
    given = _with_flags(await given_arguments(request, ADAPTER_FIELDS))
    seconds = request.app[SERVICE].profile.predict_timeout
    await registry.update(name, partial(_updated, given), seconds, alias, reads_again=True)
    return await _changed(registry, name, given, f"{alias or name} updated")


def _updated(given: Mapping[str, Any], current: Adapter) -> Adapter:
    """Return the adapter with what the call gives; the rest stays as it is."""
    return replace(
        current,
        src=str(given.get("src") or current.src),
        preload=given.get("preload", current.preload),
        pin=given.get("pin", current.pin),
        options=MappingProxyType({**current.options, **_options(given)}),
    )


def adapter_registry(request: web.Request) -> AdapterRegistry:
    """Return the registry.

    Raises:
        NotReadyError: the model is not loaded yet.
        BadParameterError: the engine runs without LoRA.
    """
    registry = request.app[SERVICE].runtime.adapters
    registry.check_enabled()
    return registry


def _check_model(request: web.Request) -> InferenceService:
    """Return the service once the model in the path is known to be ours; checked first."""
    service = request.app[SERVICE]
    model = request.match_info.get("model")
    if model is None and not service.lifecycle.has_model:
        raise BadParameterError(
            "The adapter must be prefixed with a model unless there is only a single startup "
            "model used."
        )
    is_ours = service.lifecycle.has_model and model in (None, service.lifecycle.model_name)
    if not is_ours:
        raise ResourceNotFoundError(f"The model {model} was not found", "BadRequestException")
    return service


def _options(given: Mapping[str, Any]) -> Mapping[str, str]:
    return MappingProxyType(
        {name: str(value) for name, value in given.items() if name not in (*ADAPTER_FIELDS, WAIT)}
    )


def _with_flags(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with true and false, in any case, as booleans; null is left out.

    Raises:
        BadParameterError: a flag is anything else, which LMI takes for false.
    """
    read = {name: value for name, value in given.items() if name not in FLAGS}
    for name in FLAGS:
        if (value := given.get(name)) is None:
            continue
        text = str(value).lower()
        if text not in ("true", "false"):
            raise BadParameterError(f"The parameter {name} must be true or false")
        read[name] = text == "true"
    return read


async def _changed(
    registry: AdapterRegistry, name: str, given: Mapping[str, Any], done: str
) -> web.Response:
    """Answer at once, or when every replica has the change; 202 names those that have not.

    No error: what is done here stands, and a proxy would repeat the call on another server.
    """
    status = {"status": f"Adapter {done}"}
    if registry.hooks.sharing is None or not given.get(WAIT):
        return json_answer(status)
    unconfirmed = dict(await registry.hooks.sharing.confirm(name))
    if not unconfirmed:
        return json_answer(status)
    return json_answer({**status, "unconfirmed": unconfirmed}, 202)


def _alias(request: web.Request) -> str | None:
    return request.headers.get(ADAPTER_ALIAS_HEADER) or None


def _shown(adapter: Adapter) -> dict[str, Any]:
    shown = {name: getattr(adapter, name) for name in ADAPTER_FIELDS}
    shown["src"] = mask_urls(adapter.src)
    return {**shown, "from_store": True} if adapter.is_from_store else shown
