"""What llm-d's router takes from one scrape of `/metrics`, by the rules of its metrics extractor.

Rules of `pkg/epp/framework/plugins/datalayer/extractor/metrics` at github.com/llm-d/llm-d-router,
for its engine type `vllm`, and of its `lora-affinity-scorer`; residency as in pull request 2792.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

LORA: Final = "vllm:lora_requests_info"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server, as the router knows it after a scrape.

    `loaded` has the level and the pin of each adapter that the workers hold; None says that the
    server does not report them.
    """

    waiting: int
    running: int
    cache_use: float
    block_size: int
    blocks: int
    active: frozenset[str]
    awaited: frozenset[str]
    slots: int
    loaded: Mapping[str, tuple[str, bool]] | None
    with_slot: int
    base_model: str

    def affinity(self, model: str) -> float:
        """Return the score of the server for a request to this adapter, by who is active."""
        if model in self.active:
            return 1.0
        if len(self.active) + len(self.awaited) < self.slots:
            return 0.8
        return 0.6 if model in self.awaited else 0.0


def extracted(text: str) -> Endpoint:
    """Read a scrape.

    Raises:
        LookupError, ValueError: a series or a label that the router needs is not there, or no
            number; the router counts an error and keeps what it knew.
    """
    families = {one.name: one for one in text_string_to_metric_families(text)}
    cache = _latest(families, "vllm:cache_config_info").labels
    info = max(_samples(families, LORA), key=lambda one: one.value, default=None)
    labels = {"max_lora": "0"} if info is None else info.labels
    counts = _samples(families, "vllm:num_gpu_loaded_lora_adapters")
    slots = [one.value for one in _samples(families, "vllm:max_gpu_lora_adapters")]
    loaded = _loaded(_samples(families, "vllm:lora_adapter_loaded"))
    return Endpoint(
        waiting=int(_latest(families, "vllm:num_requests_waiting").value),
        running=int(_latest(families, "vllm:num_requests_running").value),
        cache_use=_latest(families, "vllm:kv_cache_usage_perc").value,
        block_size=int(cache["block_size"]),
        blocks=int(cache["num_gpu_blocks"]),
        active=_names(labels.get("running_lora_adapters", "")),
        awaited=_names(labels.get("waiting_lora_adapters", "")),
        slots=int(max(slots, default=int(labels["max_lora"]))),
        loaded=loaded if loaded or counts else None,
        with_slot=int(max((one.value for one in counts), default=0)),
        base_model=counts[0].labels["model_name"] if counts else "",
    )


def _loaded(samples: Sequence[Sample]) -> dict[str, tuple[str, bool]]:
    """All ranks together: a slot outranks main memory, and one pin is enough; 0 is no adapter."""
    found: dict[str, tuple[str, bool]] = {}
    for one in samples:
        if one.value and (name := one.labels.get("adapter_name")):
            level, is_pinned = found.get(name, ("cpu", False))
            level = "gpu" if "gpu" in (level, one.labels["level"]) else "cpu"
            found[name] = level, is_pinned or one.labels["pinned"] == "true"
    return found


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, map(str.strip, text.split(","))))


def _samples(families: Mapping[str, Metric], name: str) -> Sequence[Sample]:
    family = families.get(name)
    if family is not None and family.type not in ("gauge", "counter"):
        raise ValueError(f"{name} is a {family.type}, whose value the router reads as 0")
    return () if family is None else family.samples


def _latest(families: Mapping[str, Metric], name: str) -> Sample:
    """Return the sample that was set last; of those without a time the first."""
    if not (samples := _samples(families, name)):
        raise LookupError(f"metric family {name} is not there")
    return max(samples, key=lambda one: float(one.timestamp or 0))
