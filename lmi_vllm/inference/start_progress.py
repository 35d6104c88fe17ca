"""The progress of a start: its phases, the engine's steps, and the seconds of each."""

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from lmi_vllm.clock import Laps


class Phase(StrEnum):
    """The phase of a start; `/ping` shows these names."""

    SETTINGS = "settings"
    DOWNLOAD = "download"
    ENGINE = "engine"
    ADAPTERS = "adapters"
    WARM_UP = "warm-up"


_AFTER_THE_ENGINE: Final = (Phase.ADAPTERS, Phase.WARM_UP)
_WEIGHTS: Final = "weights"  # the step of `engine/vllm/start_steps.py`
_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


class StartProgress:
    """Progress of a start: its phase, the seconds of each, the engine's steps, the download."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.phase = Phase.SETTINGS
        self.is_running = True
        self.step = ""  # of the engine's phase, as far as its log says
        self.download = _NOTHING  # the last figures of a download, also after its end
        self.progress = _NOTHING  # start of the running phase
        self.figures = _NOTHING  # of the engine's last start, also after its end
        self._weight_sizes: Sequence[int] = ()  # of files, as the engine reads them
        self._now = now
        self._began = now()
        self._engine_began: float | None = None
        self._is_repeated = False  # an engine's start in a process that has imported all
        # Of the last start, from its engine phase on, and of the last repeated one; 0: unknown.
        self._first_seconds = self._again_seconds = 0.0
        self._phases, self._steps = Laps(now), Laps(now)
        self._phases.enter(self.phase)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the server began to start, or to restart its engine."""
        return self._now() - self._began

    @property
    def engine_seconds(self) -> float:
        """Seconds since the engine began to start; 0 before."""
        return 0.0 if self._engine_began is None else self._now() - self._engine_began

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        """Seconds of each phase of the last start, the running one included."""
        return self._phases.seconds

    @property
    def step_seconds(self) -> Mapping[str, float]:
        """Seconds of each step of the engine's last start, the running one included."""
        return self._steps.seconds

    @property
    def weight_files_read(self) -> int:
        """Files of weights that the engine has read."""
        read = self.figures.get("weight_files", 0)
        return int(read) if isinstance(read, int | float) else 0

    def expect_weights(self, sizes: Sequence[int]) -> None:
        """Tell bytes by the number of files: these are theirs, in the order of reading."""
        self._weight_sizes = sizes

    def enter(self, phase: Phase) -> None:
        """Enter `phase`; no effect if it is the running one. A phase may be entered again."""
        if phase is self.phase:
            return
        if phase is Phase.ENGINE and self.phase not in _AFTER_THE_ENGINE:
            self._engine_began = self._now()
        if phase is Phase.ADAPTERS:
            self._end_step()
        self._phases.enter(phase)
        self.phase, self.progress = phase, _NOTHING

    def enter_step(self, step: str, figures: Mapping[str, object]) -> None:
        """Enter a step of the engine's phase; `figures` are added to those of earlier ones.

        May be called from any thread.
        """
        if self.phase in _AFTER_THE_ENGINE:
            return
        if step != self.step:
            figures = {**self._weights_of(step), **figures}
            self._steps.enter(step)
            self.step = step
        if figures:
            self.figures = {**self.figures, **self._with_bytes(figures)}
            self.progress = {**self.progress, **self.figures}

    def _weights_of(self, step: str) -> Mapping[str, int]:
        """Return that no file is read where the weights' step begins, and all are where it ends.

        The engine says it in between, and nothing where it takes a moment.
        """
        count = len(self._weight_sizes)
        if not count or _WEIGHTS not in (step, self.step):
            return {}
        return {"weight_files": 0 if step == _WEIGHTS else count, "weight_files_total": count}

    def _with_bytes(self, figures: Mapping[str, object]) -> Mapping[str, object]:
        """Return figures with the bytes of so many files; none of a draft model's own files."""
        sizes, read = self._weight_sizes, figures.get("weight_files")
        if not sizes or not isinstance(read, int | float):
            return figures
        if figures.get("weight_files_total") != len(sizes):
            return {} if "weight_bytes" in self.figures else figures
        done, total = sum(sizes[: int(read)]), sum(sizes)
        return {**figures, "weight_bytes": done, "weight_bytes_total": total}

    def report(self, progress: Mapping[str, object]) -> None:
        """Keep the figures of a running download; may be called from any thread."""
        self.progress = self.download = progress

    @property
    def seconds_left(self) -> float:
        """Seconds that the engine needs if it takes as long as the last one; 0: unknown."""
        if not self.is_running or self._engine_began is None:
            return 0.0
        last = self.again_seconds if self._is_repeated else self._first_seconds
        return max(0.0, last - self.engine_seconds)

    @property
    def again_seconds(self) -> float:
        """Seconds of the last engine that was started again; 0: unknown."""
        return self._again_seconds

    @property
    def measured(self) -> tuple[float, float]:
        """Seconds of the last first start and of the last repeated one, the running included."""
        if self._is_repeated:
            return self._first_seconds, self.engine_seconds
        return self.engine_seconds, self._again_seconds

    def expect(self, first: float, again: float) -> None:
        """Estimate by these times of an earlier process; see `measured`."""
        self._first_seconds, self._again_seconds = first, again

    def restart(self) -> None:
        """Restart the clock, at the engine phase."""
        self.is_running = self._is_repeated = True
        self._began = self._engine_began = self._now()
        self._phases.clear()
        self._steps.clear()
        self.phase, self.step = Phase.ENGINE, ""
        self.progress = self.figures = _NOTHING
        self._phases.enter(self.phase)

    def end(self, *, is_ready: bool = False) -> None:
        """Stop the clock at the end of the start, successful or not."""
        if is_ready and self.is_running:
            self._first_seconds, self._again_seconds = self.measured
        self.is_running = False
        self._phases.enter("")
        self._end_step()

    def _end_step(self) -> None:
        self._steps.enter("")
        self.step = ""
