"""vLLM's own two adapter routes, in its shapes and words, over the same registry as LMI's API.

Where vLLM answers 500 because an adapter cannot be loaded, the answer here is 400: the fault is the
adapter's (vllm/entrypoints/openai/models/serving.py, 0.32).
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import orjson
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import (
    AdapterCapacityError,
    AdapterConflictError,
    AdapterMissingError,
    ManagementError,
    ResourceNotFoundError,
)
from lmi_vllm.inference.request.body import not_json
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.inference_routes import read_body
from lmi_vllm.web.request import OPTIONS, SERVICE, RouteGroup, Routes

Fields = dict[str, Any]

_FLAG: Final = TypeAdapter(bool)  # "true" and 1 are true, as in vLLM's LoadLoRAAdapterRequest


class _RefusalError(Exception):
    """An error answer of vLLM: its text, status and name for the kind of error."""

    def __init__(
        self,
        text: str,
        status: int = 400,
        kind: str = "InvalidUserInput",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(text)
        self.status, self.kind, self.headers = status, kind, headers


def _add(app: web.Application) -> None:
    if app[OPTIONS].routes is Routes.INFERENCE:
        return
    app.router.add_post("/v1/load_lora_adapter", _answering(_load))
    app.router.add_post("/v1/unload_lora_adapter", _answering(_unload))


def _answering(
    act: Callable[[AdapterRegistry, InferenceService, Fields], Awaitable[str]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        registry = request.app[SERVICE].runtime.adapters
        registry.check_enabled()
        try:
            text = await act(registry, request.app[SERVICE], await _fields(request))
        except _RefusalError as error:
            detail = {
                "message": str(error),
                "type": error.kind,
                "param": None,
                "code": error.status,
            }
            return web.json_response({"error": detail}, status=error.status, headers=error.headers)
        return web.Response(text=text)

    return handler


async def _load(registry: AdapterRegistry, service: InferenceService, given: Fields) -> str:
    """Register an adapter; with `load_inplace` also over one of the same name.

    Servers that share their adapters have it from a call on another one: a controller that calls
    each of them has no error then.
    """
    name, path = given.get("lora_name"), given.get("lora_path")
    if not name or not path:
        raise _RefusalError("Both 'lora_name' and 'lora_path' must be provided.")
    if name in service.profile.served_names:
        raise _RefusalError(f"The lora adapter '{name}' conflicts with a served base model.")
    await registry.refresh(name, is_searched=False)
    is_in_place, is_found = _is_in_place(given), registry.is_from_store(name)
    is_known = name in registry and not is_found and not is_in_place
    if is_known and not _is_shared(registry, name, path):
        raise _RefusalError(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True."
        )
    try:
        if is_in_place or is_found:
            seconds = service.profile.predict_timeout
            await registry.replace(Adapter(name, path), seconds, is_in_place=is_in_place)
        elif not is_known:
            await _register(registry, name, path)
    except ManagementError as error:
        raise _load_refusal(error, name, path) from error
    return f"Success: LoRA adapter '{name}' added successfully."


async def _register(registry: AdapterRegistry, name: str, path: str) -> None:
    try:
        await registry.register(Adapter(name, path))
    except AdapterConflictError:
        if not _is_shared(registry, name, path):  # else it came while this call waited
            raise


def _is_shared(registry: AdapterRegistry, name: str, path: str) -> bool:
    """Whether other servers have this adapter from this place, too, as a call has left it."""
    if registry.hooks.sharing is None or name not in registry or registry.is_from_store(name):
        return False
    return registry.describe(name).src.rstrip("/") == path.rstrip("/")


def _is_in_place(given: Fields) -> bool:
    try:
        return _FLAG.validate_python(given.get("load_inplace", False))
    except ValidationError as error:
        text = f"load_inplace: {error.errors()[0]['msg']}"
        raise _RefusalError(text, kind="BadRequestError") from None


def _load_refusal(error: ManagementError, name: str, path: str) -> _RefusalError:
    if isinstance(error, AdapterCapacityError):
        later = {"Retry-After": str(error.retry_after_seconds)}
        return _RefusalError(error.text, 507, "InternalServerError", later)
    if isinstance(error, AdapterMissingError):
        text = f"Loading lora {name} failed: No adapter found for {path}"
        return _RefusalError(text, 404, "NotFoundError")
    return _RefusalError(error.text, 400, "BadRequestError")


async def _unload(registry: AdapterRegistry, service: InferenceService, given: Fields) -> str:
    """Unregister an adapter."""
    name = given.get("lora_name")
    if not name:
        raise _RefusalError("'lora_name' needs to be provided to unload a LoRA adapter.")
    try:
        await registry.remove(name, service.profile.predict_timeout)
    except ResourceNotFoundError as error:
        sharing = registry.hooks.sharing
        if sharing is None or not sharing.is_removed(name):  # by a call on another server
            text = f"The lora adapter '{name}' cannot be found."
            raise _RefusalError(text, 404, "NotFoundError") from error
    return f"Success: LoRA adapter '{name}' removed successfully."


async def _fields(request: web.Request) -> Fields:
    try:
        given = orjson.loads(await read_body(request))
    except orjson.JSONDecodeError as error:
        text = f"The {not_json(error, request.content_type)}"
        raise _RefusalError(text, kind="BadRequestError") from None
    if not isinstance(given, dict):
        raise _RefusalError("The body must be a JSON object", kind="BadRequestError")
    for name in ("lora_name", "lora_path"):
        if not isinstance(given.get(name, ""), str):
            text = f"{name}: Input should be a valid string"
            raise _RefusalError(text, kind="BadRequestError")
    return given


GROUP: Final = RouteGroup(_add)
