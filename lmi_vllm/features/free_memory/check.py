"""Checks free memory before a model is loaded: `required_memory_mb`, `reserved_memory_mb`."""

from pathlib import Path
from typing import ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import EVERYWHERE, FILE, option, ours
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import FeatureSettings, Settings
from lmi_vllm.errors import EngineMemoryError
from lmi_vllm.host_memory import free_host_memory, memory_place, total_host_memory
from lmi_vllm.translate.devices import ask_nvidia_smi
from lmi_vllm.translate.draft import ArgumentDraft

MIB: Final = 1 << 20
_NVIDIA_SMI_SECONDS: Final = 10.0
_REQUIRED: Final = "required_memory_mb"
_RESERVED: Final = "reserved_memory_mb"


class FreeMemorySettings(FeatureSettings):
    """How much has to be free, and to stay free."""

    section: ClassVar[str] = "Server"

    # fmt: off
    required_memory_mb: int = option(parse.whole_number, ours(), default=0, written=(FILE,),
        values="MiB", note="Free memory demanded before loading.")
    reserved_memory_mb: int = option(parse.whole_number, ours(), default=500, written=EVERYWHERE,
        values="MiB", note="Memory that must stay free.")
    gpu_required_memory_mb: int | None = option(parse.whole_number, ours(),
        name="gpu.required_memory_mb", written=(FILE,), values="MiB",
        note="As required_memory_mb, on each GPU.")
    gpu_reserved_memory_mb: int | None = option(parse.whole_number, ours(),
        name="gpu.reserved_memory_mb", written=(FILE,), values="MiB",
        note="As reserved_memory_mb, on each GPU.")
    # fmt: on


def check_memory(settings: Settings) -> tuple[()]:
    """Return if there is enough, or nothing is asked.

    Raises:
        EngineMemoryError: for lack of memory; what cannot be known counts as too little.
    """
    if errors := memory_errors(settings):
        raise EngineMemoryError("; ".join(errors))
    return ()


def warn_of_memory(draft: ArgumentDraft, root: Path = Path("/")) -> None:
    """Warn where more is asked than is there at all; another machine may be the one that serves."""
    asked, total = _asked(draft.settings, ""), total_host_memory(root)
    server = draft.settings.feature(FreeMemorySettings)
    wanted = server.required_memory_mb + server.reserved_memory_mb
    if asked is not None and total is not None and wanted > total // MIB:
        draft.warn(
            f"{asked.label}: {server.required_memory_mb} MiB ({_REQUIRED}) and "
            f"{server.reserved_memory_mb} MiB to stay free ({_RESERVED}) are more than the "
            f"{total // MIB} MiB of {memory_place(root)}: a server does not start here",
            asked,
        )


def memory_errors(
    settings: Settings, root: Path = Path("/"), nvidia_smi: str | None = None
) -> list[str]:
    """Return an error for each kind of memory that is short; only kinds that are set are checked.

    `root` has `proc` and `sys`; `nvidia_smi` is the program that reports a GPU's free memory.
    """
    errors = []
    if asked := _asked(settings, ""):
        errors += _missing(settings, "", asked, memory_place(root), free_host_memory(root))
    if asked := _asked(settings, "gpu."):
        free = free_gpu_memory(nvidia_smi)
        if not free:
            errors.append(f"{asked.label}: no GPU says how much memory it has (nvidia-smi)")
        for index, bytes_free in enumerate(free):
            errors += _missing(settings, "gpu.", asked, f"GPU {index}", bytes_free)
    return errors


def free_gpu_memory(nvidia_smi: str | None = None) -> list[int]:
    """Return the free bytes of each GPU; none without the driver's tool."""
    lines = ask_nvidia_smi("gpu=memory.free", _NVIDIA_SMI_SECONDS, nvidia_smi)
    return [int(line) * MIB for line in lines if line.isdigit()]


def _asked(settings: Settings, prefix: str) -> Setting | None:
    """Return the setting that asks for a check; a default does not, None without one."""
    said = settings.feature(FreeMemorySettings).details
    found = (said.required_memory_mb, said.reserved_memory_mb)
    if prefix:
        found = (said.gpu_required_memory_mb, said.gpu_reserved_memory_mb)
    return next((setting for setting in found if setting.is_set), None)


def _missing(
    settings: Settings, prefix: str, asked: Setting, place: str, bytes_free: int | None
) -> list[str]:
    if bytes_free is None:
        return [f"{asked.label}: the free memory of {place} cannot be read"]
    server = settings.feature(FreeMemorySettings)
    required, reserved = server.required_memory_mb, server.reserved_memory_mb
    if prefix:
        required = server.gpu_required_memory_mb or 0
        reserved = server.gpu_reserved_memory_mb or 0
    if required + reserved <= bytes_free // MIB:
        return []
    return [
        f"{asked.label}: not enough memory to load the model: {required} MiB "
        f"({prefix}{_REQUIRED}) and {reserved} MiB to stay free ({prefix}{_RESERVED}), "
        f"of {place} {bytes_free // MIB} MiB are available"
    ]
