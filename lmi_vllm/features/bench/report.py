"""The report of a run: figures, a text table, a JSON document."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lmi_vllm.features.bench.plan import RequestOutcome
from lmi_vllm.features.bench.run import LoadRun
from lmi_vllm.features.metrics import percentile

PERCENTILES: Final = (50, 90, 95, 99)
MAX_ERROR_LENGTH: Final = 100  # characters of an error's example
_MILLISECONDS: Final = 1000


@dataclass(frozen=True, slots=True)
class Times:
    """Every value of one latency, in seconds."""

    name: str
    title: str
    values: Sequence[float]

    def figures(self) -> dict[str, float] | None:
        """Return mean, percentiles and maximum in milliseconds; None without a value."""
        if not self.values:
            return None
        values = [value * _MILLISECONDS for value in self.values]
        return {
            "mean": round(statistics.fmean(values), 3),
            **{f"p{percent}": percentile(values, percent) for percent in PERCENTILES},
            "max": round(max(values), 3),
        }


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The figures of one run."""

    run: LoadRun
    subject: str  # target, dialect and load, in words

    @property
    def good(self) -> list[RequestOutcome]:
        """The successful requests: only these count for latencies and throughput."""
        return [outcome for outcome in self.run.outcomes if outcome.is_good]

    def times(self) -> tuple[Times, ...]:
        """Return every latency; those of tokens only where answers were streamed."""
        good = self.good
        first = [one.first_token - one.began for one in good if one.first_token is not None]
        each = [
            (one.last_token - one.first_token) / (one.output_tokens - 1)
            for one in good
            if one.first_token is not None and one.last_token is not None and one.output_tokens > 1
        ]
        return (
            Times("time_to_first_token", "time to first token", first),
            Times("inter_token_latency", "inter-token latency", [g for o in good for g in o.gaps]),
            Times("time_per_output_token", "time per output token", each),
            Times("end_to_end", "end to end", [one.ended - one.began for one in good]),
        )

    def document(self) -> dict[str, Any]:
        """Return the report as a JSON document; times in milliseconds, rates per second."""
        run, good = self.run, self.good
        seconds = run.seconds or 1e-9
        output = sum(outcome.output_tokens for outcome in good)
        prompt = sum(outcome.prompt_tokens for outcome in good)
        return {
            "subject": self.subject,
            "seconds": round(run.seconds, 3),
            "requests": len(run.outcomes),
            "good": len(good),
            "failed": len(run.outcomes) - len(good),
            "cut_off": run.cut,
            "requests_per_second": round(len(good) / seconds, 3),
            "output_tokens": output,
            "output_tokens_per_second": round(output / seconds, 3),
            "prompt_tokens": prompt or None,  # some dialects do not report it
            "latency_milliseconds": {time.name: time.figures() for time in self.times()},
            "errors": self._errors(),
            "adapters": self._adapters(),
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        document = self.document()
        counts = f"{document['good']} good, {document['failed']} failed"
        counts += f", {self.run.cut} cut off by the interruption" if self.run.cut else ""
        lines = [
            self.subject,
            f"{document['requests']} requests in {self.run.seconds:.1f} s: {counts}",
            f"requests/s {document['requests_per_second']:.2f}   "
            f"output tokens/s {document['output_tokens_per_second']:.1f}   "
            f"output tokens {document['output_tokens']}",
        ]
        shown = [(time.title, time.figures()) for time in self.times()]
        rows = [[name, *_shown(figures)] for name, figures in shown if figures is not None]
        if rows:
            head = ["milliseconds", "mean", *(f"p{p}" for p in PERCENTILES), "max"]
            lines += ["", *aligned([head, *rows])]
        if adapters := document["adapters"]:
            head = ["adapter", "requests", "failed", "first token p50", "end to end p50"]
            lines += [
                "",
                *aligned([head, *([n, *map(str, r.values())] for n, r in adapters.items())]),
            ]
        if errors := document["errors"]:
            lines += ["", "errors"]
            lines += [
                f"{error['count']:>7}  {kind}: {error['example'][:MAX_ERROR_LENGTH]}"
                for kind, error in errors.items()
            ]
        return lines

    def _errors(self) -> dict[str, dict[str, Any]]:
        kinds = Counter(one.error for one in self.run.outcomes if one.error is not None)
        examples = {
            one.error: one.example for one in reversed(self.run.outcomes) if one.error is not None
        }
        return {
            kind: {"count": count, "example": examples[kind]} for kind, count in kinds.most_common()
        }

    def _adapters(self) -> dict[str, dict[str, Any]]:
        by_name: Mapping[str, list[RequestOutcome]] = defaultdict(list)
        for outcome in self.run.outcomes:
            by_name[outcome.adapter or "base"].append(outcome)
        if set(by_name) <= {"base"}:
            return {}
        return {name: _of_adapter(outcomes) for name, outcomes in sorted(by_name.items())}


def _of_adapter(outcomes: Iterable[RequestOutcome]) -> dict[str, Any]:
    outcomes = list(outcomes)
    good = [one for one in outcomes if one.is_good]
    first = [one.first_token - one.began for one in good if one.first_token is not None]
    whole = [one.ended - one.began for one in good]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "first_token_p50": percentile([v * _MILLISECONDS for v in first], 50) if first else None,
        "end_to_end_p50": percentile([v * _MILLISECONDS for v in whole], 50) if whole else None,
    }


def _shown(figures: Mapping[str, float]) -> list[str]:
    return [f"{value:.1f}" if value < 1e5 else f"{value:.0f}" for value in figures.values()]  # noqa: PLR2004


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines in columns: the first aligned left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        row[0].ljust(widths[0])
        + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
