"""What a benchmark found: tables, claims beside their targets, and curves to plot."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lmi_vllm.features.bench.report import aligned


@dataclass(frozen=True)
class Table:
    """Rows of texts under a head; `title` says what was measured and in which unit."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> Iterator[str]:
        """Yield the table as aligned text."""
        yield self.title
        yield from aligned([self.head, *self.rows])

    def markdown(self) -> Iterator[str]:
        """Yield the table as Markdown."""
        yield from (self.title, "")
        for row in (self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows):
            yield f"| {' | '.join(row)} |"


@dataclass(frozen=True)
class Claim:
    """A ratio or number that was promised; met where it is at most the target, or at least."""

    text: str
    value: float
    target: float
    is_at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the promise is kept."""
        return self.value >= self.target if self.is_at_least else self.value <= self.target

    def cells(self) -> list[str]:
        """Return the row of the table of claims."""
        sign = "\N{GREATER-THAN OR EQUAL TO}" if self.is_at_least else "\N{LESS-THAN OR EQUAL TO}"
        verdict = "met" if self.is_met else "NOT met"
        return [self.text, f"{self.value:.2f}", f"{sign} {self.target:g}", verdict]


@dataclass(frozen=True)
class Plot:
    """Lines over a common axis: name -> points."""

    title: str
    horizontal: str
    vertical: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Result:
    """All that one benchmark has to say."""

    tables: Sequence[Table] = ()
    claims: Sequence[Claim] = ()
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = field(default=())

    def claims_table(self) -> Table:
        """Return the claims as a table."""
        head = ["claim", "found", "target", ""]
        return Table("Against the targets", head, [claim.cells() for claim in self.claims])

    def print(self) -> None:
        """Print everything as text."""
        tables = [*self.tables, *([self.claims_table()] if self.claims else [])]
        for table in tables:
            print(*table.lines(), "", sep="\n")
        for note in self.notes:
            print(note)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the median, and in brackets the least and the most."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
