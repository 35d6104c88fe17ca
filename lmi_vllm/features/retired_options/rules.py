"""Rules for older options that became another argument."""

from lmi_vllm.config.setting import Setting
from lmi_vllm.features.retired_options.options import DroppedArguments, ForeignOptions
from lmi_vllm.translate.draft import ArgumentDraft


def legacy_arguments(draft: ArgumentDraft) -> None:
    """Put the arguments that older switches became, unless they are set."""
    foreign = draft.settings.feature(ForeignOptions).details
    dropped = draft.settings.feature(DroppedArguments).details
    _put_inverse(draft, dropped.disable_log_requests, "enable_log_requests")
    _put_inverse(draft, foreign.enable_cuda_graph, "enforce_eager")
    if foreign.use_custom_all_reduce.value is False:
        reduce = foreign.use_custom_all_reduce
        _put_unless_set(draft, reduce, "disable_custom_all_reduce", True)
    if dropped.worker_use_ray.value is True:
        _put_unless_set(draft, dropped.worker_use_ray, "distributed_executor_backend", "ray")
    if (backend := dropped.guided_decoding_backend).is_set:
        _put_unless_set(draft, backend, "structured_outputs_config", {"backend": backend.value})
    rope = [one for one in (dropped.rope_scaling, dropped.rope_theta) if one.is_set]
    overrides = {setting.name: setting.value for setting in rope}
    is_set = "hf_overrides" in draft.values
    for setting in rope:
        if is_set:
            draft.warn(
                f"{setting.label} has no effect: {draft.label('hf_overrides')} is set", setting
            )
        else:
            draft.put("hf_overrides", overrides, setting.origin)


def _put_inverse(draft: ArgumentDraft, switch: Setting, argument: str) -> None:
    """Put `argument` as the inverse of the older switch."""
    if switch.is_set:
        _put_unless_set(draft, switch, argument, not switch.value)


def _put_unless_set(draft: ArgumentDraft, setting: Setting, argument: str, value: object) -> None:
    """Set `argument` from an older option, unless its own name is set."""
    if argument not in draft.values:
        draft.put(argument, value, setting.origin)
    elif draft.values[argument] != value:
        draft.warn(f"{setting.label} has no effect: {draft.label(argument)} is set", setting)


def legacy_lengths(draft: ArgumentDraft) -> None:
    """Put max_model_len as the sum of TensorRT-LLM's two lengths."""
    said = draft.settings.feature(ForeignOptions).details
    given = [setting for setting in (said.max_input_len, said.max_output_len) if setting.is_set]
    if not given:
        return
    lengths = [setting.value for setting in given if isinstance(setting.value, int)]
    labels = " and ".join(setting.label for setting in given)
    if len(lengths) == 1:
        draft.warn(f"{labels} has no effect alone; use option.max_model_len", *given)
    elif "max_model_len" in draft.values:
        draft.warn(f"{labels} have no effect: {draft.label('max_model_len')} is set", *given)
    else:
        draft.put("max_model_len", sum(lengths), given[0].origin)
        draft.warn(f"{labels} are used as max_model_len={sum(lengths)}, their sum", *given)
