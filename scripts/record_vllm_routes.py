"""Record every route that the installed vLLM's HTTP application can have, as config/vllm-routes/.

`python scripts/record_vllm_routes.py [--check]`, where vLLM is installed. The application is built
as vLLM builds it, without an engine: once with every task and every switch, and once without each
of them, which says what a route needs. `python scripts/make_docs.py` makes the page of it.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from record_vllm_arguments import front_end_parser

FOLDER: Final = Path(__file__).resolve().parent.parent / "config" / "vllm-routes"
# What `vllm serve` must be told for a route to be there: a variable, or an argument and its value.
DEV_MODE: Final = "VLLM_SERVER_DEV_MODE"
ADAPTERS: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
PROFILER: Final = "--profiler-config"
FAULTS: Final = "--enable-fault-tolerance"
SCALE_OUT: Final = "--enable-scale-out"
# The one for adapters is left out first: once built with it, SageMaker's library keeps its routes.
SWITCHES: Final = (ADAPTERS, DEV_MODE, PROFILER, FAULTS, SCALE_OUT)
POOLING: Final = ("embed", "classify", "token_embed", "token_classify")
# `render` is a server of its own, not a model's task.
TASKS: Final = ("generate", "transcription", "realtime", *POOLING)
WEBSOCKET: Final = "WEBSOCKET"


@contextmanager
def variables(switches: Iterable[str]) -> Iterator[None]:
    """Set the switches that are variables for the body, and unset the others."""
    before = dict(os.environ)
    os.environ |= {name: "1" if name in switches else "0" for name in (DEV_MODE, ADAPTERS)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def arguments(switches: Iterable[str]) -> Namespace:
    """Return what `vllm serve` would have read of its command line."""
    from vllm.config import ProfilerConfig  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    read: Namespace = front_end_parser()(FlexibleArgumentParser()).parse_args([])
    profiler = {"profiler": "torch", "torch_profiler_dir": "/"} if PROFILER in switches else {}
    read.profiler_config = ProfilerConfig(**profiler)
    read.enable_fault_tolerance = FAULTS in switches
    read.enable_scale_out = SCALE_OUT in switches
    return read


class AnyModel:
    """As much of a model's configuration as vLLM asks when it lays out its routes."""

    hf_config = SimpleNamespace(num_labels=1)

    def get_pooling_task(self, tasks: Iterable[str]) -> str | None:
        """Return the first task that pools."""
        return next((task for task in POOLING if task in tasks), None)


def application(tasks: Iterable[str] = TASKS, switches: Iterable[str] = SWITCHES) -> Any:
    """Return vLLM's FastAPI application for a model of these tasks, without an engine."""
    from vllm.entrypoints.launchers.app import build_app  # noqa: PLC0415

    with variables(switches):
        return build_app(arguments(switches), tuple(tasks), AnyModel())


def routes(app: Any) -> Mapping[str, tuple[set[str], str]]:
    """Return the methods of each path, and the module that answers."""
    found: dict[str, tuple[set[str], str]] = {}
    for route in app.routes:
        endpoint = getattr(route, "endpoint", None)
        methods = getattr(route, "methods", None) or (set() if endpoint is None else {WEBSOCKET})
        path = route.path or "/"
        known = found.get(path, (set(), ""))
        module = str(getattr(endpoint, "__module__", ""))
        found[path] = (known[0] | methods - {"HEAD"}, known[1] or module)
    return found


def record() -> tuple[str, list[dict[str, object]]]:
    """Return the installed release (major.minor) and a row for each route."""
    from vllm.version import __version__  # noqa: PLC0415

    without = {switch: set(SWITCHES) - {switch} for switch in SWITCHES}
    by_switch = {name: routes(application(TASKS, rest)) for name, rest in without.items()}
    by_task = {task: routes(application([task])) for task in TASKS}
    rows: list[dict[str, object]] = []
    for path, (methods, module) in sorted(routes(application()).items()):
        needs = [name for name, rest in by_switch.items() if _is_less(rest.get(path), module)]
        tasks = [task for task, there in by_task.items() if path in there]
        row = {"path": path, "methods": sorted(methods), "needs": needs}
        rows.append(row | {"tasks": [] if len(tasks) == len(TASKS) else tasks})
    return ".".join(__version__.split(".")[:2]), rows


def _is_less(there: tuple[set[str], str] | None, module: str) -> bool:
    """Whether a route is gone, or answers only to say so: another module's function."""
    return there is None or there[1] != module


def main() -> int:
    """Write the record, or with --check say whether the stored one still holds."""
    release, rows = record()
    lines = ",\n".join(f" {json.dumps(row)}" for row in rows)
    target, text = FOLDER / f"{release}.json", f"[\n{lines}\n]\n"
    if "--check" not in sys.argv:
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return 0
    if target.is_file() and target.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{target} is stale: run scripts/record_vllm_routes.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
