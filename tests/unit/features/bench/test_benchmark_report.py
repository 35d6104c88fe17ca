"""The files of `make bench`'s report: the README shows one of its plots."""

from pathlib import Path

from integration.bench.report import THROUGHPUT, write
from integration.bench.results import Plot, Result


def plot(title: str) -> Result:
    """Return a result with one plot."""
    return Result(plots=[Plot(title, "streams", "tokens/s", {"ours": [(1, 2), (4, 8)]})])


def test_throughput_has_a_file_of_its_own(tmp_path: Path) -> None:
    """All plots together, and the one of the README."""
    write({"serving": plot(THROUGHPUT), "growth": plot("CPU per token")}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.md",
        "report.png",
        "throughput.png",
    }


def test_figures_not_measured_are_not_drawn(tmp_path: Path) -> None:
    """A run of another part leaves the README's plot alone."""
    write({"growth": plot("CPU per token")}, tmp_path)
    assert not (tmp_path / "throughput.png").exists()
