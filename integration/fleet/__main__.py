"""`python -m integration.fleet`: the long form, on the real engine; prints what it measured.

python -m integration.fleet --proxy nginx --adapters 200
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from integration.conftest import ServerProcess, start_server
from integration.fleet.events import Found, Plan, run
from integration.fleet.proxies import PROXIES


def report(plan: Plan, found: Found) -> str:
    """Return what was measured, for people."""
    load = found.load
    lines = [
        f"requests {load.answered}, of which streams {load.streams}",
        f"lost {len(load.lost)}; streams cut behind their first byte {len(load.cut)}, and by the "
        f"kill -9 {len(found.cut_by_kill)}",
        f"answers crossed {len(load.crossed)}; unlike their adapter's own {len(load.different)}",
        f"adapters with answers of their own: {len(set(load.answers.values()))} of "
        f"{len(load.answers)}",
        f"adapters wrong on a server after the refresh time: {len(found.unknown)}",
        *found.calls,
        f"MiB of a server with its engine: {found.memory_mib}",
    ]
    for kind, seconds in load.first_tokens.items():
        if len(seconds) > 1:
            cuts = statistics.quantiles(seconds, n=100)
            figures = f"p50 {cuts[49] * 1000:.0f} ms, p99 {cuts[98] * 1000:.0f} ms"
            lines.append(f"first token, {kind} ({len(seconds)}): {figures}")
    if found.servers_at_rest:
        each = found.s3_calls_a_minute / found.servers_at_rest
        lines.append(
            f"S3 calls a minute at rest: {found.s3_calls_a_minute:.0f} of {found.servers_at_rest} "
            f"servers, {each:.1f} each, state read every {plan.refresh_seconds:g} s"
        )
    return "\n".join([*lines, *problems(found)[:20]])


def problems(found: Found) -> list[str]:
    """Return what none of may be: requests lost or cut, answers of others, adapters missing."""
    load = found.load
    return [*load.lost, *load.cut, *load.crossed, *load.different, *found.unknown]


def _all_but_logs(_: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.endswith((".txt", ".log"))]


def main() -> None:
    """Run it once."""
    parser = argparse.ArgumentParser(prog="python -m integration.fleet")
    parser.add_argument("--proxy", choices=PROXIES, default="haproxy")
    parser.add_argument("--engine", choices=("vllm", "scripted"), default="vllm")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rest", type=float, default=120)
    parser.add_argument("--logs", type=Path, help="a folder that keeps what the servers have said")
    given = parser.parse_args()
    plan = Plan(
        given.proxy, given.engine, given.servers, given.adapters, given.clients, 0.5,
        given.requests, 5.0, given.rest,
    )  # fmt: skip
    servers: list[ServerProcess] = []
    began, loads = time.monotonic(), [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:

        def start(*words: str, environ: dict[str, str]) -> ServerProcess:
            servers.append(start_server(Path(folder), *words, environ=environ))
            return servers[-1]

        try:
            found = run(plan, start, Path(folder))
        finally:
            for server in servers:
                server.kill()
            if given.logs:
                shutil.copytree(folder, given.logs, ignore=_all_but_logs, dirs_exist_ok=True)
    loads.append(os.getloadavg()[0])
    print(f"{plan}, {time.monotonic() - began:.0f} s, {os.cpu_count()} CPUs, load {loads}")
    print(report(plan, found))
    if problems(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
