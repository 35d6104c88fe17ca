"""The one model as the management API sees it: its description, and the slot of another one."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast

from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import Fault, ManagementError
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import OriginKind
from lmi_vllm.server.context import ModelContext
from lmi_vllm.translate.devices import detect_devices


class ModelConflictError(ManagementError):
    """A model of that name is registered already; 409."""

    fault = Fault.CONFLICT


class ModelCapacityError(ManagementError):
    """There is no room for another model: one per process, or memory is not enough; 507."""

    fault = Fault.MEMORY


@dataclass(frozen=True, slots=True)
class ShownModel:
    """What a description says of the model besides its URL and state."""

    is_loaded_at_startup: bool = True
    start_time: str = ""
    device_type: str = "cpu"
    batch_size: int = 1
    max_batch_delay: int = 100  # milliseconds
    max_idle_time: int = 60  # seconds
    # Figures for clients that check them: one engine serves whatever comes.
    min_workers: int = 1
    max_workers: int = 1


@dataclass(slots=True)
class ManagedModel:
    """The model of one server; where it is the start's, it stays."""

    shown: ShownModel = field(default_factory=ShownModel)
    is_registered: bool = False  # by a call, in a `ModelSlot`


def managed_model(service: InferenceService) -> ManagedModel:
    """Return what this feature keeps of the model of a server, with the server's service."""
    return cast(ManagedModel, service.kept.setdefault(ManagedModel, ManagedModel()))


@contextlib.asynccontextmanager
async def describing(model: ModelContext) -> AsyncIterator[None]:
    """Describe a model by its settings, while the body runs."""
    managed, server = managed_model(model.service), model.settings.server
    has_gpu = bool(detect_devices(model.environ).gpu_count)
    least, most = _worker_counts(model.settings, has_gpu)
    managed.shown = ShownModel(
        is_loaded_at_startup=not managed.is_registered,
        start_time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device_type="gpu" if has_gpu else "cpu",
        batch_size=_shown_count(server.batch_size, 1),
        max_batch_delay=_shown_count(server.max_batch_delay, 100),
        max_idle_time=_shown_count(server.max_idle_time, 60),
        min_workers=least,
        max_workers=most,
    )
    yield


def _worker_counts(settings: Settings, has_gpu: bool) -> tuple[int, int]:
    """Return the least and most workers that the settings ask for, the most special ones first."""
    said = settings.server.details
    special = (
        (said.gpu_min_workers, said.gpu_max_workers)
        if has_gpu
        else (said.cpu_min_workers, said.cpu_max_workers)
    )
    least = _first_count(special[0], said.file_min_workers, said.min_workers)
    return least, max(least, _first_count(special[1], said.file_max_workers, said.max_workers))


def _first_count(special: Setting, general: Setting, variable: Setting) -> int:
    """Return the first of these that counts workers, 1 without one; a platform's stands alone."""
    is_platform = general.origin.kind is OriginKind.PLATFORM
    found = (general,) if is_platform else (special, general, variable)
    return next((one.value for one in found if isinstance(one.value, int) and one.value), 1)


def _shown_count(text: str | None, default: int) -> int:
    """Return a number that is only shown; what is no number counts as not given."""
    return int(text) if text and text.isdecimal() else default
