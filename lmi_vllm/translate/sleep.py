"""What the sleep of an idle model needs of the engine, and where it cannot be had."""

from typing import Final

from lmi_vllm.translate.draft import ArgumentDraft

_STOP: Final = "stop"
_ENABLE: Final = "enable_sleep_mode"


def put_sleep(draft: ArgumentDraft) -> None:
    """Enable vLLM's sleep mode for its levels; refuse a sleep that this start cannot have."""
    said = draft.settings.server.details
    level, after = said.lmi_sleep_level, said.lmi_sleep_after_seconds
    nodes = draft.values.get("nnodes")
    if after.value and isinstance(nodes, int) and nodes > 1:
        draft.fail(
            f"{after.stated} is not possible with {draft.label('nnodes')}={nodes}: engines of "
            f"other nodes are not ended and started from here",
            after,
        )
    if level.value == _STOP:
        return
    if not draft.devices.gpu_count:
        draft.fail(
            f"{level.stated} needs a GPU: on a CPU vLLM refuses enable_sleep_mode, and its worker "
            f"ignores sleep. LMI_SLEEP_LEVEL=stop ends the engine there, too",
            level,
        )
    elif draft.values.get(_ENABLE) is False:
        draft.fail(f"{level.stated} needs sleep mode, but {draft.label(_ENABLE)} is false", level)
    else:
        draft.put_if_unset(_ENABLE, True, level.origin)
