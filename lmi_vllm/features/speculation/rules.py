"""Speculative decoding: LMI's names, vLLM's own and vLLM's older ones become one argument."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from lmi_vllm.checks.model_config import read_directory
from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import DROPPED, computes, option, warns
from lmi_vllm.config.setting import Details, Setting
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.messages import EngineArguments
from lmi_vllm.sources.local import is_directory
from lmi_vllm.translate.draft import ArgumentDraft

if TYPE_CHECKING:
    from lmi_vllm.server.start_parts import Fetch

_SPECULATIVE_LENGTH: Final = 5  # LMI's default
# What vLLM 0.32 takes in the place of a model for methods that have none (config/speculative.py).
_METHODS_WITHOUT_MODEL: Final = (
    "ngram", "[ngram]", "ngram_gpu", "suffix", "extract_hidden_states", "custom_class",
)  # fmt: skip
# vLLM 0.32 recognizes an EAGLE head by its path, which a fetched head need not have kept.
_NAMED_METHODS: Final = (("eagle-", "eagle"), ("eagle3", "eagle3"))


class SpeculationSettings(FeatureSettings):
    """Draft tokens: LMI's names, vLLM's own and vLLM's older ones."""

    section: ClassVar[str] = "Speculative decoding"

    # fmt: off
    speculative_draft_model: str | None = option(parse.plain_text, computes("speculative_config"),
        aliases=("draft_model_id",), values="hub id, URL of a store, path",
        note="The draft model.")
    speculative_length: int | None = option(parse.count, computes("speculative_config"),
        aliases=("spec_length",), values="number",
        note="Draft tokens per step; 5 if a draft model is set. 0 turns speculation off.")
    draft_model_tp_size: int | None = option(parse.positive_int, computes("speculative_config"),
        values="1 or the tensor parallel degree",
        note="GPUs the draft model uses; 1 when a draft model is set.")
    speculative_config: dict[str, object] | None = option(parse.as_vllm,
        computes("speculative_config"), values="JSON",
        note="vLLM's own form; not beside the three above.")
    record_acceptance_rate: str | None = option(parse.any_text, warns("the acceptance rate is "
        "logged every LMI_STATS_INTERVAL seconds anyway", quiet_for=("false", "False", "FALSE")))
    speculative_model: str | None = option(parse.plain_text, computes("speculative_config"),
        section=DROPPED, note="Becomes speculative_config where that is unset; [ngram] means the "
        "ngram method.")
    num_speculative_tokens: int | None = option(parse.positive_int, computes("speculative_config"),
        section=DROPPED, note="Becomes part of speculative_config.")
    ngram_prompt_lookup_max: int | None = option(parse.positive_int, computes("speculative_config"),
        section=DROPPED, note="Becomes part of speculative_config.")
    ngram_prompt_lookup_min: int | None = option(parse.positive_int, computes("speculative_config"),
        section=DROPPED, note="Becomes part of speculative_config.")
    # fmt: on


@dataclass(frozen=True, slots=True)
class DraftReference:
    """A draft model that is not on the disk yet."""

    model: str
    revision: str | None


def draft_reference(arguments: Mapping[str, object]) -> DraftReference | None:
    """Return the draft model that has to be fetched for these arguments; None without one."""
    config = arguments.get("speculative_config")
    if not isinstance(config, Mapping):
        return None
    model, revision = config.get("model"), config.get("revision")
    if (
        not isinstance(model, str)
        or model in _METHODS_WITHOUT_MODEL
        or config.get("method") in _METHODS_WITHOUT_MODEL
    ):
        return None
    if is_directory(model):
        return None
    return DraftReference(model, None if revision is None else str(revision))


async def fetch_draft(arguments: EngineArguments, fetch: "Fetch") -> EngineArguments:
    """Return `arguments` with the path of the draft model, which is fetched if it is remote."""
    draft = draft_reference(arguments.values)
    if draft is None:
        return arguments
    return with_draft_files(arguments, await fetch(draft.model, draft.revision))


def with_draft_files(arguments: EngineArguments, local: Path) -> EngineArguments:
    """Return `arguments` with the draft model at `local`, its revision removed."""
    config = arguments.values["speculative_config"]
    assert isinstance(config, Mapping)
    kept = {name: value for name, value in config.items() if name != "revision"}
    fetched = _with_method({**kept, "model": str(local)}, str(config["model"]))
    return replace(arguments, values={**arguments.values, "speculative_config": fetched})


def _with_method(config: Mapping[str, object], written: str) -> Mapping[str, object]:
    """Return `config` with the method of a local drafter; a method that is given wins.

    vLLM takes a drafter that it cannot identify for a draft model. Published Medusa heads have no
    `model_type`; EAGLE heads are identified by their class, or the name they were `written` with.
    """
    model = config.get("model")
    if "method" in config or not isinstance(model, str) or not is_directory(model):
        return config
    stated = read_directory(Path(model)).config or {}
    if "medusa_num_heads" in stated:
        return {**config, "method": "medusa"}
    named = stated.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if "Eagle3" in architecture:
        return {**config, "method": "eagle3"}
    if architecture.startswith("Eagle"):
        return {**config, "method": "eagle"}
    for part, method in _NAMED_METHODS:
        if part in written.lower():
            return {**config, "method": method}
    return config


def configure(draft: ArgumentDraft) -> None:
    """Put speculative_config from LMI's three options, vLLM's own, or vLLM's older ones."""
    said = draft.settings.feature(SpeculationSettings).details
    config, model, degree = (
        said.speculative_config, said.speculative_draft_model, said.draft_model_tp_size
    )  # fmt: skip
    given = [one for one in (model, said.speculative_length, degree) if one.is_set]
    if config.is_set:
        for setting in given:
            draft.fail(
                f"{setting.label} and {config.label} both describe speculative decoding: "
                f"set one of them",
                setting,
                config,
            )
        value = config.value
        if isinstance(value, Mapping):
            value = _with_method(value, str(value.get("model")))
        draft.put("speculative_config", value, config.origin)
    elif model.is_set:
        length = _length(draft, said)
        if length.is_set and length.value == 0:
            draft.warn(
                f"{length.stated}: speculation is off, and {model.label} is not loaded",
                length,
                model,
            )
            return
        value = {
            "model": model.value,
            "num_speculative_tokens": length.value if length.is_set else _SPECULATIVE_LENGTH,
            "draft_tensor_parallel_size": degree.value if degree.is_set else 1,
        }
        draft.put("speculative_config", _with_method(value, str(model.value)), model.origin)
    else:
        for setting in given:
            draft.warn(
                f"{setting.label} has no effect without option.speculative_draft_model", setting
            )
    _put_old_options(draft, said)


def _length(draft: ArgumentDraft, said: Details[SpeculationSettings]) -> Setting:
    """Return the setting of the draft length: LMI's option, else vLLM's."""
    length, vllm_length = said.speculative_length, said.num_speculative_tokens
    if length.is_set and vllm_length.is_set and length.value != vllm_length.value:
        draft.fail(
            f"{length.stated} and {vllm_length.stated} differ: set one of them", length, vllm_length
        )
    return length if length.is_set else vllm_length


def _put_old_options(draft: ArgumentDraft, said: Details[SpeculationSettings]) -> None:
    """Put speculative_config from vLLM's older options, where it is unset."""
    model, length = said.speculative_model, said.num_speculative_tokens
    most, least = said.ngram_prompt_lookup_max, said.ngram_prompt_lookup_min
    # Beside LMI's draft model the length counts, see _length.
    lengths = () if said.speculative_draft_model.is_set else (length,)
    given = [setting for setting in (model, *lengths, most, least) if setting.is_set]
    if not given:
        return
    if "speculative_config" in draft.values or not model.is_set:
        reason = (
            f"beside {draft.label('speculative_config')}"
            if model.is_set
            else "without option.speculative_model"
        )
        for setting in given:
            draft.warn(f"{setting.label} has no effect {reason}", setting)
        return
    value: dict[str, object] = {"model": model.value}
    if model.value == "[ngram]":
        value = {"method": "ngram"}
    is_counted = length in given
    value["num_speculative_tokens"] = length.value if is_counted else _SPECULATIVE_LENGTH
    for bound, argument in ((most, "prompt_lookup_max"), (least, "prompt_lookup_min")):
        if bound.is_set:
            value[argument] = bound.value
    draft.put("speculative_config", _with_method(value, str(model.value)), model.origin)


def check_draft_degree(draft: ArgumentDraft) -> None:
    """Refuse a draft degree that is neither 1 nor the tensor parallel degree."""
    said = draft.settings.feature(SpeculationSettings).details
    setting, degree = said.draft_model_tp_size, draft.values.get("tensor_parallel_size")
    if not setting.is_set or not said.speculative_draft_model.is_set:
        return
    if setting.value not in (1, degree):
        draft.fail(f"{setting.stated} must be 1 or the tensor parallel degree ({degree})", setting)
