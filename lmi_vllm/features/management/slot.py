"""The slot for one model in a server that was started without one.

A registered model goes through the same start as any other; unregistering it frees the slot.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from lmi_vllm.adapters.source import CODE_FILE
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import (
    BadParameterError,
    DownloadError,
    EngineMemoryError,
    LmiError,
    ModelSourceError,
    NotReadyError,
    ResourceNotFoundError,
)
from lmi_vllm.features.management.managed_model import (
    ModelCapacityError,
    ShownModel,
    managed_model,
)
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.context import ServerContext
from lmi_vllm.server.model_manager import MakeSupervisor
from lmi_vllm.server.model_settings import planned
from lmi_vllm.server.plan import StartPlan
from lmi_vllm.server.supervisor import Outcome, Supervisor
from lmi_vllm.sources.local import file_url_path, without_file_scheme
from lmi_vllm.sources.trusted_folders import untrusted_code_reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewModel:
    """A model to load: `url` is a folder, a URL that a source claims, or a hub id."""

    url: str
    name: str = ""  # empty: as the URL says
    is_synchronous: bool = True
    arguments: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


class ModelSlot:
    """Holds at most one registered model; `make` prepares the service and returns a supervisor."""

    def __init__(
        self,
        context: ServerContext,
        typed: CommandLine,
        make: MakeSupervisor,
    ) -> None:
        self._service = context.service
        self._model = managed_model(context.service)
        self._model.is_registered = True
        context.service.kept[ModelSlot] = self
        self._typed = typed
        self._context = context
        self._make = make
        self._supervisor: Supervisor | None = None
        self._run_task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    async def run(self) -> Outcome:
        """Return the outcome of the model that ends the server; wait for ever without one."""
        self._empty()
        return await self._ended

    async def register(self, new: NewModel) -> str:
        """Load the model and return its name; where not synchronous, return once loading began.

        Raises:
            ModelCapacityError: another model is there, or memory is not enough.
            ResourceNotFoundError: there is nothing at the URL.
            BadParameterError: it cannot be served.
        """
        lifecycle = self._service.lifecycle
        if lifecycle.state is State.DRAINING:
            raise NotReadyError("the server is shutting down")
        if lifecycle.has_model:
            self._refuse(new)
        async with self._lock:
            if lifecycle.has_model:
                self._refuse(new)
            plan, settings = await self._plan(new)
            self._supervisor = await self._make(plan, settings)
            if new.arguments.get("job_queue_size", "").isdecimal():
                self._service.queue.resize(int(new.arguments["job_queue_size"]))
            lifecycle.begin_registered()
            loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._run_task = asyncio.create_task(self._run_model(self._supervisor, loaded))
        if new.is_synchronous:
            await asyncio.shield(loaded)
        else:
            loaded.add_done_callback(_log_failure)
        return plan.model.name

    async def unregister(self) -> None:
        """Refuse new requests, let the running ones end, and free what the model holds."""
        async with self._lock:
            supervisor, run_task = self._supervisor, self._run_task
            self._empty()  # new requests are for a model that is not there
            await self._service.queue.wait_idle(self._service.profile.predict_timeout)
            if supervisor is not None:
                await supervisor.drained()
            if run_task is not None:
                run_task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await run_task
            if supervisor is not None:
                await supervisor.close()
                await supervisor.leave()

    async def close(self) -> None:
        """End the engine, if there is one."""
        if self._supervisor is not None:
            await self._supervisor.close()

    async def _run_model(self, supervisor: Supervisor, loaded: "asyncio.Future[None]") -> None:
        ready = asyncio.create_task(supervisor.ready.wait())
        run: asyncio.Task[Outcome] = asyncio.create_task(supervisor.run())
        try:
            await asyncio.wait({ready, run}, return_when=asyncio.FIRST_COMPLETED)
            if supervisor.ready.is_set():
                loaded.set_result(None)
                outcome = await run
                if not self._ended.done():
                    self._ended.set_result(outcome)
                return
            await supervisor.leave()
            self._empty()
            loaded.set_exception(_load_error(run.exception()))
        finally:
            await _cancel(run, ready)
            if not loaded.done():
                loaded.set_exception(NotReadyError("the model was unregistered while it loaded"))

    async def _plan(self, new: NewModel) -> tuple[StartPlan, Settings]:
        try:
            typed = _command_line(self._typed, new)
            environ = _without_chosen_models(self._context.environ)
            settings = self._context.configuration.load(environ, typed)
            plan, settings = await planned(self._context, settings, typed, environ)
        except ResourceNotFoundError:
            raise
        except (ModelSourceError, DownloadError) as error:
            raise ResourceNotFoundError(error.text, "ModelNotFoundException") from error
        except LmiError as error:
            is_memory = isinstance(error, EngineMemoryError)
            raise (ModelCapacityError if is_memory else BadParameterError)(error.text) from error
        if plan is None:
            raise ResourceNotFoundError(f"there is no model at {new.url}", "ModelNotFoundException")
        await asyncio.to_thread(_check_code, plan, settings, new.url)
        return _named(plan, new.name), settings

    def _refuse(self, new: NewModel) -> None:
        raise ModelCapacityError(
            f"{new.name or new.url} cannot be loaded: this server serves one model at a time; "
            f"unregister {self._service.lifecycle.model_name} first"
        )

    def _empty(self) -> None:
        self._supervisor = self._run_task = None
        self._service.detach()
        self._model.shown = ShownModel()
        self._service.lifecycle.remove_model()


def model_slot(service: InferenceService) -> ModelSlot | None:
    """Return the slot of a server that was started without a model; None of any other."""
    slot = service.kept.get(ModelSlot)
    return slot if isinstance(slot, ModelSlot) else None


def _command_line(typed: CommandLine, new: NewModel) -> CommandLine:
    """Return the command line that would start with this model.

    Raises:
        BadParameterError: the URL is not valid.
        ResourceNotFoundError: it is a path, and there is nothing.
    """
    try:
        scheme, named = urlsplit(new.url).scheme, file_url_path(new.url)
    except ValueError as error:  # half of an IPv6 address, or another machine
        raise BadParameterError(f"url: {new.url} is not a valid URL: {error}") from error
    path = new.url if named is None else str(named)
    if path.startswith(("/", ".", "~")) and not Path(path).exists():
        raise ResourceNotFoundError(f"there is no model at {new.url}", "ModelNotFoundException")
    if scheme not in ("", "file") or Path(path).exists():
        return replace(typed, model=None, demo=False, models=path)
    return replace(typed, model=path, demo=False, models="NONE")


def _check_code(plan: StartPlan, settings: Settings, url: str) -> None:
    """Check that no other user could change code which the model at `url` brings.

    Raises:
        BadParameterError: one could.
    """
    folder, model = plan.model.directory, settings.model
    weights = Path(plan.model.model)  # another folder where option.model_id names one
    places = []
    if folder is not None and settings.server.lmi_custom_code != "none":
        entry = folder / str(model.entry_point or CODE_FILE)  # which may lie elsewhere
        has_requirements = (folder / "requirements.txt").is_file()
        places += [folder, entry] if entry.is_file() else [folder] * has_requirements
    if model.trust_remote_code:
        found = [one for one in (folder, weights) if one is not None and one.is_dir()]
        places += [one for one in found if any(one.rglob("*.py"))]
    if places and (archive := Path(without_file_scheme(url))).is_file():
        places.append(archive)  # what it was unpacked to is this user's
    for place in places:
        if reason := untrusted_code_reason(place, "code of a model that is registered over HTTP"):
            raise BadParameterError(f"url: the model brings code, and {reason}")


def _without_chosen_models(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without SERVING_LOAD_MODELS, which names other models."""
    return {name: text for name, text in environ.items() if name != "SERVING_LOAD_MODELS"}


def _named(plan: StartPlan, name: str) -> StartPlan:
    """Return the plan under the name that was asked for, if any was."""
    if not name:
        return plan
    profile = replace(plan.translation.profile, model_name=name)
    translation = replace(plan.translation, profile=profile)
    return replace(plan, model=replace(plan.model, name=name), translation=translation)


def _load_error(error: BaseException | None) -> LmiError:
    """Return the answer to POST /models when the start has failed."""
    text = error.text if isinstance(error, LmiError) else f"{type(error).__name__}: {error}"
    if isinstance(error, (EngineMemoryError, MemoryError)):
        return ModelCapacityError(text)
    if isinstance(error, DownloadError):
        return ResourceNotFoundError(text, "ModelNotFoundException")
    return error if isinstance(error, LmiError) else LmiError(text)


def _log_failure(loaded: "asyncio.Future[None]") -> None:
    if (error := loaded.exception()) is not None:
        logger.error("the registered model could not be loaded: %s", error)


async def _cancel(*tasks: "asyncio.Task[Outcome] | asyncio.Task[bool]") -> None:
    for task in tasks:
        task.cancel()
    waiting: Awaitable[object] = asyncio.gather(*tasks, return_exceptions=True)
    await waiting
