"""Names that older configurations hold: what they become (names.json: why they have no effect)."""

import json
from collections.abc import Iterator
from importlib.resources import files
from types import MappingProxyType
from typing import Any, ClassVar, Final

from pydantic import create_model

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import (
    DROPPED,
    OTHER_BACKENDS,
    SERVER_LEVEL,
    Effect,
    EffectWord,
    computes,
    maps_to,
    no_effect,
    option,
    refuses,
    warns,
)
from lmi_vllm.config.settings import FeatureSettings

_SECTIONS: Final = MappingProxyType(
    {"foreign": OTHER_BACKENDS, "dropped": DROPPED, "java": "Server"}
)


def fallback_for(target: str, text: str = "") -> Effect:
    """The value becomes the engine argument if that is not set otherwise; `text` is the warning."""
    return Effect(EffectWord.MAPS_TO, (target,), text, is_fallback=True)


def boolean_or_text(text: str) -> bool | str:
    """A boolean if the text is one, else the text: for names whose value has no effect."""
    try:
        return parse.boolean(text)
    except ValueError:
        return text


class ForeignOptions(FeatureSettings):
    """Of DeepSpeed, Accelerate, LMI-Dist, Neuron and TensorRT-LLM."""

    section: ClassVar[str] = OTHER_BACKENDS

    # fmt: off
    max_tokens: int | None = option(parse.positive_human_int, fallback_for("max_model_len", "it "
        "was DeepSpeed's prompt plus answer"), note="DeepSpeed.")
    enable_cuda_graph: bool | None = option(parse.boolean, computes("enforce_eager"),
        note="DeepSpeed. enforce_eager is its inverse.")
    n_positions: int | None = option(parse.positive_human_int,
        fallback_for("max_model_len", "it was Neuron's sequence length"), note="Neuron.")
    load_split_model: bool | None = option(parse.boolean,
        refuses("this layout cannot be read; use the original Hugging Face checkpoint",
                quiet_for=(False,)),
        note="Neuron.")
    max_input_len: int | None = option(parse.positive_human_int, computes("max_model_len"),
        note="TensorRT-LLM. With max_output_len: max_model_len is the sum.")
    max_output_len: int | None = option(parse.positive_human_int, computes("max_model_len"),
        note="TensorRT-LLM. With max_input_len: max_model_len is the sum.")
    max_num_tokens: int | None = option(parse.positive_human_int,
        fallback_for("max_num_batched_tokens", "it was TensorRT-LLM's step size"),
        note="TensorRT-LLM.")
    max_num_sequences: int | None = option(parse.positive_int, fallback_for("max_num_seqs"),
        note="TensorRT-LLM. Sequences at once.")
    kv_cache_free_gpu_mem_fraction: float | None = option(parse.fraction,
        fallback_for("gpu_memory_utilization", "it was a share of free memory, vLLM's is a share "
        "of all memory"), note="TensorRT-LLM.")
    tokens_per_block: int | None = option(parse.positive_int,
        fallback_for("block_size", "it was TensorRT-LLM's block size"), note="TensorRT-LLM.")
    use_custom_all_reduce: bool | None = option(parse.boolean,
        computes("disable_custom_all_reduce"), note="false means disable_custom_all_reduce=true.")
    paged_attention: bool | str | None = option(boolean_or_text,
        warns("vLLM's attention is always paged", quiet_for=(True,)), note="LMI-Dist.")
    # fmt: on


class DroppedArguments(FeatureSettings):
    """What older vLLM releases took."""

    section: ClassVar[str] = DROPPED

    # fmt: off
    disable_log_requests: bool | None = option(parse.boolean, computes("enable_log_requests"),
        note="enable_log_requests is its inverse.")
    rope_scaling: dict[str, object] | None = option(parse.json_object, computes("hf_overrides"),
        values="JSON", note="Folded into hf_overrides where that is unset.")
    rope_theta: float | None = option(parse.real_number, computes("hf_overrides"),
        note="Folded into hf_overrides where that is unset.")
    worker_use_ray: bool | None = option(parse.boolean, computes("distributed_executor_backend"),
        note="true means distributed_executor_backend=ray.")
    guided_decoding_backend: str | None = option(parse.plain_text,
        computes("structured_outputs_config"), note="Becomes structured_outputs_config's backend.")
    override_pooler_config: dict[str, object] | None = option(parse.json_object,
        fallback_for("pooler_config"), values="JSON", note="Older name of pooler_config.")
    collect_detailed_traces: list[str] | None = option(parse.as_vllm,
        maps_to("collect_detailed_traces"), is_lenient=True, values="model, worker, all",
        note="Older vLLM took any text; what is none of these counts as unset.")
    # fmt: on


def _unused_fields() -> Iterator[tuple[str, Any]]:
    """Yield a field for each name of names.json, which has no effect."""
    for row in json.loads((files(__package__) / "names.json").read_text("utf-8")):
        kind, why, note = row["kind"], row["why"], row.get("note", "")
        effect, written = (no_effect(why), SERVER_LEVEL) if kind == "java" else (warns(why), ())
        for name in row["names"]:
            section = _SECTIONS[kind]
            field = option(parse.any_text, effect, note=note, written=written, section=section)
            yield name, (str | None, field)


UnusedNames: type[FeatureSettings] = create_model(
    "UnusedNames", __base__=FeatureSettings, __module__=__name__, **dict(_unused_fields())
)
