"""Devices -> tensor, pipeline and data parallel sizes."""

from collections.abc import Iterator, Mapping
from typing import Final

from lmi_vllm.checks.model import head_counts, text_part
from lmi_vllm.config.setting import Setting
from lmi_vllm.messages import OriginKind
from lmi_vllm.translate.draft import FREE_GPUS, ArgumentDraft


def assign_devices(draft: ArgumentDraft) -> None:
    """Set the parallel sizes, the copies and the devices."""
    if _is_load_balanced(draft):
        return
    asked, model = draft.values.get("nnodes"), draft.settings.model
    nodes = max(1, asked) if isinstance(asked, int) else 1
    degree = model.details.tensor_parallel_degree
    pipeline = max(1, model.pipeline_parallel_degree)
    first_devices = _chosen_devices(draft)
    tensor = _tensor_size(draft, degree.is_set, pipeline, nodes, first_devices)
    draft.put("tensor_parallel_size", tensor, degree.origin)
    stages = model.details.pipeline_parallel_degree.origin
    draft.put("pipeline_parallel_size", pipeline, stages)
    span = tensor * pipeline
    if span % nodes:
        draft.fail(
            f"tensor_parallel_size x pipeline_parallel_size is {span}, which {nodes} nodes "
            f"cannot share equally"
        )
    if draft.devices.gpu_count == 0:
        _assign_cpu_ranks(draft, degree, span // nodes)
    elif draft.values.get("distributed_executor_backend") == "ray":
        _leave_to_ray(draft, first_devices)
    elif nodes == 1:
        _assign_gpus(draft, span, first_devices)
    elif span > draft.devices.gpu_count * nodes:
        draft.fail(_not_enough(draft, span, draft.devices.gpu_count * nodes))


# What vLLM's own HTTP server has for copies that answer on several nodes, or each on a port.
_LOAD_BALANCED: Final = (
    "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb",
    "data_parallel_rank", "data_parallel_start_rank",
)  # fmt: skip


def _is_load_balanced(draft: ArgumentDraft) -> bool:
    """Refuse copies outside of this server by the names of what asks for them."""
    given = {name: draft.values.get(name) for name in _LOAD_BALANCED}
    asked = [name for name, value in given.items() if value is not None and value is not False]
    here = draft.values.get("data_parallel_size_local")
    if here is not None and here != (draft.settings.model.data_parallel_size or 1):
        asked.append("data_parallel_size_local")
    for name in asked:
        draft.fail(
            f"{draft.label(name)} is not possible: all copies of a model answer in one server; "
            "leave it out, and run a server on each node or port, behind a router"
        )
    return bool(asked)


def _tensor_size(
    draft: ArgumentDraft, is_set: bool, pipeline: int, nodes: int, first_devices: list[int]
) -> int:
    """The number in the option, or the meaning of `max` and unset for these devices."""
    degree = draft.settings.model.tensor_parallel_degree
    if isinstance(degree, int) and degree > 0:
        return degree
    gpus = draft.devices.gpu_count
    if first_devices:
        gaps = [
            after - start
            for start, after in zip(first_devices, [*first_devices[1:], gpus], strict=True)
        ]
        gpus = max(0, min(gaps))
    if is_set and degree == "max":
        gpus *= nodes  # only an explicit `max` counts the other nodes' GPUs
    most = max(1, gpus // pipeline)
    size = max((size for size in draft.tensor_sizes if size <= most), default=most)
    if size < most:
        draft.warn(f"tensor_parallel_size is {size}: the model's heads do not divide by {most}")
    return size


def _label_of_copies(draft: ArgumentDraft, span: int) -> str:
    """What asks for more than one rank, where the tensor parallel degree does not."""
    details = draft.settings.model.details
    if span > 1:
        return details.pipeline_parallel_degree.label
    return draft.label("data_parallel_size")


def _assign_cpu_ranks(draft: ArgumentDraft, degree: Setting, span: int) -> None:
    """Set copies only if they are configured; fail above the CPU ranks that vLLM can place."""
    limit = draft.devices.cpu_rank_limit
    wanted = span * max(1, _put_copies(draft) or 1)
    if limit is not None and wanted > limit:
        label = degree.label if degree.is_set else _label_of_copies(draft, span)
        draft.fail(
            f"{label} asks for {wanted} devices and there is no GPU; not enough devices (CPU ranks "
            f"need a NUMA node each or VLLM_CPU_OMP_THREADS_BIND)",
            degree,
        )


def _put_copies(draft: ArgumentDraft) -> int | None:
    """Set the configured copies, and return their number."""
    model = draft.settings.model
    if model.data_parallel_size is not None:
        origin = model.details.data_parallel_size.origin
        draft.put("data_parallel_size", model.data_parallel_size, origin)
    return model.data_parallel_size


def _leave_to_ray(draft: ArgumentDraft, first_devices: list[int]) -> None:
    """Set copies only if they are configured: GPUs of a Ray cluster cannot be counted here."""
    _put_copies(draft)
    if first_devices:
        chosen = draft.settings.server.details.load_on_devices
        draft.warn(f"{chosen.stated} has no effect: Ray chooses the devices", chosen)


def _assign_gpus(draft: ArgumentDraft, span: int, first_devices: list[int]) -> None:
    """Set the copies that fit on the GPUs and the devices of each; warn of idle GPUs."""
    gpus = draft.devices.gpu_count
    if span > gpus:
        draft.fail(_not_enough(draft, span, gpus))
        return
    explicit = _put_copies(draft)
    if explicit is not None:
        copies, origin = max(1, explicit), draft.origins["data_parallel_size"]
        if span * copies > gpus:
            draft.fail(_not_enough(draft, span * copies, gpus))
            return
    else:
        copies = len(first_devices) if first_devices else _copies(draft, gpus // span)
        chosen = draft.settings.server.details.load_on_devices
        origin = chosen.origin if first_devices else FREE_GPUS
        if copies > 1:
            draft.put("data_parallel_size", copies, origin)
    used = (
        _used_devices(draft, span, first_devices) if first_devices else list(range(span * copies))
    )
    idle = [str(gpu) for gpu in range(gpus) if gpu not in used]
    if idle and not first_devices and "device_ids" not in draft.values:
        draft.warn(f"GPU {', '.join(idle)} of {gpus} stay idle: the model uses {len(used)}")
    if first_devices and used:
        draft.put_if_unset("device_ids", used, origin)


def _used_devices(draft: ArgumentDraft, span: int, first_devices: list[int]) -> list[int]:
    """The devices of every copy in load_on_devices; they must not overlap."""
    used = [start + offset for start in first_devices for offset in range(span)]
    setting = draft.settings.server.details.load_on_devices
    if len(set(used)) < len(used) or max(used) >= draft.devices.gpu_count:
        draft.fail(
            f"{setting.stated} with {span} devices a copy needs devices "
            f"{', '.join(map(str, used))}; there are 0 to {draft.devices.gpu_count - 1}",
            setting,
        )
        return []
    return used


def _copies(draft: ArgumentDraft, fitting: int) -> int:
    """Copies of the model: those that fit, within maxWorkers."""
    if not draft.takes_copies:
        return 1
    cap, _ = worker_cap(draft)
    return max(1, min(fitting, cap) if cap else fitting)


def worker_cap(draft: ArgumentDraft) -> tuple[int, str]:
    """Most copies (0: any), and the label of what says so: SageMaker, else the most special."""
    said = draft.settings.server.details
    caps = [said.file_max_workers]
    if caps[0].origin.kind is not OriginKind.PLATFORM:
        caps = [said.gpu_max_workers, *caps, said.max_workers]
    found = ((cap.value, cap.label) for cap in caps if isinstance(cap.value, int) and cap.value)
    return next(found, (0, ""))


def _chosen_devices(draft: ArgumentDraft) -> list[int]:
    """The first device of every copy that load_on_devices asks for; empty for all devices."""
    setting = draft.settings.server.details.load_on_devices
    text = draft.settings.server.load_on_devices.strip()
    if text in ("*", "") or not setting.is_set:
        return []
    parts = [part.strip() for part in text.replace(",", ";").split(";") if part.strip()]
    parts = [part.lower().removeprefix("gpu") for part in parts]  # LMI writes gpu0, too
    if draft.devices.gpu_count == 0:
        if parts != ["-1"]:
            draft.warn(f"{setting.stated} has no effect: there is no GPU", setting)
        return []
    if not all(part.isascii() and part.isdigit() for part in parts):
        draft.warn(
            f"{setting.stated} has no effect: give device numbers separated by ; "
            f"(the CPU is used only by the CPU build)",
            setting,
        )
        return []
    return sorted(int(part[:6]) for part in parts)


def _not_enough(draft: ArgumentDraft, wanted: int, available: int) -> str:
    """The message for more devices than there are."""
    labels = [
        f"{name}={draft.values[name]} ({draft.origins[name]})"
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        if name in draft.values
    ]
    return f"not enough devices: {', '.join(labels)} need {wanted} GPUs, {available} are visible"


def offer_sizes(draft: ArgumentDraft) -> None:
    """Say which numbers of devices `max` may mean; any where the heads are not known."""
    heads, kv_heads = _counts(draft)
    if heads and kv_heads:
        draft.tensor_sizes = tuple(_sizes(heads, kv_heads))


def refuse_size(draft: ArgumentDraft) -> None:
    """Note an error where vLLM would refuse to split the heads: its start takes half a minute."""
    tensor, (heads, kv_heads) = draft.values.get("tensor_parallel_size"), _counts(draft)
    if isinstance(tensor, int) and heads and kv_heads and heads % tensor:
        draft.fail(
            f"tensor_parallel_size={tensor} does not divide the model's {heads} attention heads; "
            f"possible are {', '.join(map(str, _sizes(heads, kv_heads)))}",
            draft.settings.model.details.tensor_parallel_degree,
        )


def _sizes(heads: int, kv_heads: int) -> Iterator[int]:
    """The numbers of devices of which each gets as many heads, and its part of the KV heads.

    With fewer KV heads than devices each has one of them, which as many others have too.
    """
    for devices in range(1, heads + 1):
        more, fewer = max(devices, kv_heads), min(devices, kv_heads)
        if heads % devices == 0 and more % fewer == 0:
            yield devices


def _counts(draft: ArgumentDraft) -> tuple[int | None, int | None]:
    """The heads of a model that vLLM runs, with what `hf_overrides` changes."""
    if not draft.config or draft.engines.of(draft.architectures, draft.values) is not None:
        return None, None
    overrides = draft.values.get("hf_overrides")
    changes = overrides if isinstance(overrides, Mapping) else {}
    return head_counts({**text_part(draft.config), **changes})
