"""Rules for older options that became another argument."""

from lmi_vllm.config.setting import Setting
from lmi_vllm.translate.draft import ArgumentDraft


def legacy_arguments(draft: ArgumentDraft) -> None:
    """Put the arguments that older switches became, unless they are set."""
    _put_inverse(draft, "disable_log_requests", "enable_log_requests")
    _put_inverse(draft, "enable_cuda_graph", "enforce_eager")
    reduce = draft.given("use_custom_all_reduce")
    if reduce is not None and reduce.value is False:
        _put_unless_set(draft, reduce, "disable_custom_all_reduce", True)
    ray = draft.given("worker_use_ray")
    if ray is not None and ray.value is True:
        _put_unless_set(draft, ray, "distributed_executor_backend", "ray")
    backend = draft.given("guided_decoding_backend")
    if backend is not None:
        _put_unless_set(draft, backend, "structured_outputs_config", {"backend": backend.value})
    rope = {
        name: setting for name in ("rope_scaling", "rope_theta") if (setting := draft.given(name))
    }
    overrides = {name: setting.value for name, setting in rope.items()}
    is_set = "hf_overrides" in draft.values
    for setting in rope.values():
        if is_set:
            draft.warn(f"{setting.label} has no effect: {draft.label('hf_overrides')} is set")
        else:
            draft.put("hf_overrides", overrides, setting.origin)


def _put_inverse(draft: ArgumentDraft, name: str, argument: str) -> None:
    """Put `argument` as the inverse of the older switch `name`."""
    setting = draft.given(name)
    if setting is not None:
        _put_unless_set(draft, setting, argument, not setting.value)


def _put_unless_set(draft: ArgumentDraft, setting: Setting, argument: str, value: object) -> None:
    """Set `argument` from an older option, unless its own name is set."""
    if argument not in draft.values:
        draft.put(argument, value, setting.origin)
    elif draft.values[argument] != value:
        draft.warn(f"{setting.label} has no effect: {draft.label(argument)} is set")


def legacy_lengths(draft: ArgumentDraft) -> None:
    """Put max_model_len as the sum of TensorRT-LLM's two lengths."""
    given = [s for name in ("max_input_len", "max_output_len") if (s := draft.given(name))]
    if not given:
        return
    lengths = [setting.value for setting in given if isinstance(setting.value, int)]
    labels = " and ".join(setting.label for setting in given)
    if len(lengths) == 1:
        draft.warn(f"{labels} has no effect alone; use option.max_model_len")
    elif "max_model_len" in draft.values:
        draft.warn(f"{labels} have no effect: {draft.label('max_model_len')} is set")
    else:
        draft.put("max_model_len", sum(lengths), given[0].origin)
        draft.warn(f"{labels} are used as max_model_len={sum(lengths)}, their sum")
