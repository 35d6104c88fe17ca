"""The live view of a run: a few lines redrawn in place on a terminal, plain lines elsewhere."""

import asyncio
import statistics
from dataclasses import dataclass, field
from typing import Final, TextIO

from lmi_vllm.features.bench.run import LoadRun

DRAW_SECONDS: Final = 0.5
LINE_SECONDS: Final = 5.0
LAST: Final = 200  # answers that the live percentiles are computed from
BARS: Final = "▁▂▃▄▅▆▇█"
HISTORY: Final = 48


@dataclass(slots=True)
class LiveView:
    """Shows the figures of `run` on `stream` while it runs."""

    run: LoadRun
    stream: TextIO
    _rates: list[float] = field(default_factory=list)
    _tokens: int = 0
    _drawn: int = 0

    async def show(self) -> None:
        """Draw until cancelled."""
        is_terminal = self.stream.isatty()
        while True:
            await asyncio.sleep(DRAW_SECONDS if is_terminal else LINE_SECONDS)
            self._measure(DRAW_SECONDS if is_terminal else LINE_SECONDS)
            if is_terminal:
                self._draw()
            else:
                self.stream.write(f"{'; '.join(self.lines())}\n")
                self.stream.flush()

    def clear(self) -> None:
        """Erase the drawn lines."""
        if self._drawn:
            self.stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self.stream.flush()
            self._drawn = 0

    def lines(self) -> list[str]:
        """Return the lines that are shown."""
        run, last = self.run, self.run.outcomes[-LAST:]
        failed = sum(not outcome.is_good for outcome in run.outcomes)
        first = [one.first_token - one.began for one in last if one.first_token is not None]
        whole = [one.ended - one.began for one in last if one.is_good]
        wanted = "" if run.plan.number is None else f"/{run.plan.number}"
        rate = self._rates[-1] if self._rates else 0.0
        return [
            f"{run.now():.0f} s  {len(run.outcomes)}{wanted} done, {run.in_flight} in flight, "
            f"{failed} failed",
            f"output tokens/s of answers {rate:.0f}",
            f"first token p50 {_milliseconds(first)}, end to end p50 {_milliseconds(whole)}",
        ]

    def _measure(self, seconds: float) -> None:
        tokens = sum(outcome.output_tokens for outcome in self.run.outcomes)
        self._rates = [*self._rates[1 - HISTORY :], (tokens - self._tokens) / seconds]
        self._tokens = tokens

    def _draw(self) -> None:
        lines = self.lines()
        lines[1] += f"  {sparkline(self._rates)}"
        self.clear()
        self.stream.write("".join(f"{line}\n" for line in lines))
        self.stream.flush()
        self._drawn = len(lines)


def sparkline(values: list[float]) -> str:
    """Return one bar character for each value, scaled to the largest."""
    top = max(values, default=0.0)
    return "".join(BARS[int(value / top * (len(BARS) - 1)) if top else 0] for value in values)


def _milliseconds(values: list[float]) -> str:
    return f"{statistics.median(values) * 1000:.0f} ms" if values else "-"
