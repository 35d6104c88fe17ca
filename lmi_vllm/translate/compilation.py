"""On a CPU vLLM compiles a model with a C++ compiler; without one the model runs as it is."""

from typing import Final

from lmi_vllm.messages import Origin, OriginKind
from lmi_vllm.translate.draft import ArgumentDraft

_EAGER: Final = "enforce_eager"
# Arguments of those who choose by themselves how a model is compiled.
_CHOSEN: Final = ("compilation_config", "optimization_level")
_COST: Final = "the start is shorter, each token takes longer (docs/startup.md#compiled-code)"


def compile_if_possible(draft: ArgumentDraft) -> None:
    """Switch compilation off where it would fail, and refuse what asks for it."""
    lack, eager = draft.devices.missing_compiler, draft.values.get(_EAGER)
    if draft.devices.gpu_count or not lack or eager or draft.model is None:
        return
    if draft.engines.of(draft.architectures, draft.values) is not None:  # it compiles nothing
        return
    if eager is not None:
        draft.fail(f"{draft.label(_EAGER)} is false and needs {lack}, which this system lacks")
    elif not any(name in draft.values for name in _CHOSEN):
        draft.put(_EAGER, True, Origin(OriginKind.DERIVED, "no compiler"))
        draft.warn(
            f"this system lacks {lack}, with which vLLM compiles a model for the CPU: "
            f"{_EAGER}=true is used; {_COST}"
        )
