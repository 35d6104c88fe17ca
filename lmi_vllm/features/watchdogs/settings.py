"""How long a stall lasts before something is done about it."""

from typing import Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.translate.draft import ArgumentDraft

STALLS_TO_RESTART: Final = 3  # times LMI_STALL_TIMEOUT


class WatchdogSettings(FeatureSettings):
    """How long a stall lasts before something is done about it."""

    # fmt: off
    lmi_stall_timeout: float = variable(parse.seconds_or_off, "Engine alive, work queued, no token "
        "for so long: /ping 503; 0 is off.", default=120, values="seconds")
    lmi_stall_restart_timeout: float | None = variable(parse.seconds_or_off, "A stall that lasts "
        "so long is an engine failure: a restart within retry_threshold, else the end; 3 times "
        "`LMI_STALL_TIMEOUT` unless set; 0 is off.", values="seconds")
    lmi_idle_probe_interval: float = variable(parse.seconds_or_off, "An engine without requests "
        "for so long is asked for one token: one that hangs is then a stall; 0 is off.", default=0,
        values="seconds")
    # fmt: on

    @property
    def hang_seconds(self) -> float:
        """Seconds after which a stall is an engine failure; 0: never."""
        asked = self.lmi_stall_restart_timeout
        return STALLS_TO_RESTART * self.lmi_stall_timeout if asked is None else asked


def check_restart(draft: ArgumentDraft) -> None:
    """Warn of a restart or a probe that nothing follows: no stall is seen without the watch."""
    asked = draft.settings.feature(WatchdogSettings)
    if (seconds := asked.lmi_stall_restart_timeout) and not asked.lmi_stall_timeout:
        draft.warn(f"LMI_STALL_RESTART_TIMEOUT={seconds:g} has no effect with LMI_STALL_TIMEOUT=0")
    if (seconds := asked.lmi_idle_probe_interval) and not asked.lmi_stall_timeout:
        draft.warn(f"LMI_IDLE_PROBE_INTERVAL={seconds:g} sees no hang with LMI_STALL_TIMEOUT=0")
