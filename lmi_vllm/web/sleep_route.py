"""`/server/sleep`: whether the model rests; puts it to sleep, or wakes it, by a call."""

from typing import Any, Final

from aiohttp import web

from lmi_vllm.errors import BadParameterError, Fault, ManagementError
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.inference_routes import READ_METHODS, json_answer
from lmi_vllm.web.request import SERVICE, check_method

PATH: Final = "/server/sleep"
GIVE_BACK_SECONDS: Final = 60.0  # the end of an engine, or gigabytes that go to host memory


class ModelBusyError(ManagementError):
    """The model has requests, so that it is not put to sleep; 409."""

    fault = Fault.CONFLICT


async def sleep(request: web.Request) -> web.Response:
    """Answer how the model rests; POST puts it to sleep, DELETE wakes it."""
    check_method(request, (*READ_METHODS, "POST", "DELETE"))
    service = request.app[SERVICE]
    if request.method == "POST":
        await _fall_asleep(service)
    elif request.method == "DELETE":
        async with service.rest.kept_awake():
            return json_answer(_state(service))
    return json_answer(_state(service))


async def _fall_asleep(service: InferenceService) -> None:
    """Put an idle model to sleep, from which the next request wakes it as ever.

    Raises:
        BadParameterError: there is no model, or it is another state's turn.
        ModelBusyError: it is in use, or was wanted before it slept.
        NotReadyError: it starts, drains or has failed.
    """
    rest, lifecycle = service.rest, service.lifecycle
    if not lifecycle.has_model:
        raise BadParameterError("there is no model that could sleep")
    lifecycle.check_ready()
    if lifecycle.state is State.HEALTHY and (service.queue.in_flight or rest.is_kept_awake):
        raise _busy(service)
    if lifecycle.state is State.WAKING:
        raise ModelBusyError("the model is waking, since a request or a call wants it")
    await rest.fall_asleep(GIVE_BACK_SECONDS)
    lifecycle.check_ready()
    if lifecycle.state is not State.ASLEEP:
        raise _busy(service)


def _busy(service: InferenceService) -> ModelBusyError:
    if count := service.queue.in_flight:
        return ModelBusyError(f"the model has {count} requests in flight")
    if service.rest.is_kept_awake:
        return ModelBusyError("a call, such as one that changes adapters, needs the engine")
    return ModelBusyError("the model was wanted before it slept")


def _state(service: InferenceService) -> dict[str, Any]:
    lifecycle = service.lifecycle
    return {
        "status": str(lifecycle.state),
        "seconds": round(lifecycle.rest_seconds, 1),
        "wakes_on_request": lifecycle.is_resting,
        "is_given_back": service.rest.begun.is_set(),
        "level": service.rest.level,
        "last_wake_seconds": round(service.rest.wake_seconds, 1),
    }
