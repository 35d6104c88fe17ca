"""`python -m integration.gpu [--out DIR] [--only NAME,...]`: every check, and one report.

Needs no network, no .venv and no root: any Python that imports vLLM and this package will do, from
the root of a checkout. Without a GPU each check takes its form for a CPU, or says what it needs.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from integration.gpu import answers, lifecycle, sizes, speed
from integration.gpu.machine import read_machine
from integration.gpu.models import SHAPES
from integration.gpu.suite import Suite

CHECKS: Final[Mapping[str, Callable[[Suite], str]]] = MappingProxyType(
    {
        "start": lifecycle.starts_on_the_device,
        "readme requests": answers.readme_requests,
        "base beside adapters": answers.base_beside_adapters,
        "log probabilities": answers.log_probabilities,
        "structured output": answers.structured_output,
        "adapters in one batch": answers.adapters_in_one_batch,
        "sleep and wake": lifecycle.sleep_and_wake,
        "idle sleep": lifecycle.idle_sleep,
        "large idle sleep": lifecycle.large_idle_sleep,
        "memory estimate": sizes.memory_estimate,
        "tensor parallel": lifecycle.tensor_parallel,
        "engine death": lifecycle.engine_death,
        "forked engine": lifecycle.forked_engine,
        "unfit server": lifecycle.unfit_server,
        "drain": lifecycle.drain_leaves_nothing,
        "compile cache": lifecycle.compile_cache,
        "throughput": speed.throughput,
    }
)
# What clean_environment() of the scenarios takes away, and a machine's set-up may need; an option
# (OPTION_ATTENTION_BACKEND) is for every server of ours.
KEPT: Final = ("OPTION_", "VLLM_", "CUDA_", "NCCL_", "TRITON_", "HF_HUB_OFFLINE")


def main() -> int:
    """Run the checks; the exit code is the number that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="logs and report.md")
    parser.add_argument("--only", default=",".join(CHECKS), help="names, separated by commas")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="8b, or tiny without a GPU")
    parser.add_argument("--storm-seconds", type=float, default=60)
    parser.add_argument("--levels", default="", help="streams of `throughput`, by commas")
    parser.add_argument("--seconds", type=float, default=0, help="of the whole run; 0: no limit")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := sorted(set(names) - set(CHECKS)):
        parser.error(f"no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    machine = read_machine()
    given.out.mkdir(parents=True, exist_ok=True)
    suite = Suite(
        machine=machine,
        folder=given.out.resolve(),
        shape=given.shape or ("8b" if machine.has_gpu else "tiny"),
        environ={name: text for name, text in os.environ.items() if name.startswith(KEPT)},
        storm_seconds=given.storm_seconds,
        levels=tuple(map(int, filter(None, given.levels.split(",")))),
        idle=machine.memory_used(),
    )
    path = given.out / "report.md"
    suite.end_after(given.seconds)
    for name in names:
        suite.run(name, CHECKS[name])
        path.write_text(report(suite), encoding="utf-8")  # a run that is killed has one, too
    suite.clean()
    print(f"report: {path}")
    return min(100, sum(outcome.verdict == "FAIL" for outcome in suite.outcomes))


def report(suite: Suite) -> str:
    """Return the report as Markdown: the machine, every check, every table of figures."""
    lines = ["# GPU suite", "", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), ""]
    lines += _table(["what", "found"], [list(fact) for fact in suite.machine.facts()])
    rows = [
        [outcome.name, outcome.verdict, f"{outcome.seconds:.0f}", outcome.note]
        for outcome in suite.outcomes
    ]
    lines += ["", "## Checks", "", *_table(["check", "verdict", "seconds", "found"], rows)]
    for title, head, table in suite.tables:
        lines += ["", f"## {title}", "", *_table(head, table)]
    return "\n".join(lines) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table of Markdown; a cell has one line."""
    made = [head, ["---"] * len(head), *rows]
    return [
        f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in row)} |"
        for row in made
    ]


if __name__ == "__main__":
    sys.exit(main())
