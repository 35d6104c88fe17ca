"""Record every route that the installed vLLM's HTTP application can have, as config/vllm-routes/.

`python scripts/record_vllm_routes.py [--check]`, where vLLM is installed. The application is built
as vLLM builds it, without an engine: once with every task and every switch, and once without each
of them, which says what a route needs. `python scripts/make_docs.py` makes the page of it.
"""

import json
import multiprocessing
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from record_vllm_arguments import front_end_parser, store

FOLDER: Final = Path(__file__).resolve().parent.parent / "config" / "vllm-routes"
# What `vllm serve` must be told for a route to be there.
VARIABLES: Final = (
    "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_COHERE_API",
)  # fmt: skip
FLAGS: Final = (
    "--enable-fault-tolerance", "--enable-scale-out", "--enable-tokenizer-info-endpoint",
)  # fmt: skip
PROFILER: Final = "--profiler-config"
SWITCHES: Final = (*VARIABLES, *FLAGS, PROFILER)
POOLING: Final = ("embed", "classify", "token_embed", "token_classify")
# `render` is a server of its own, not a model's task.
TASKS: Final = ("generate", "transcription", "realtime", *POOLING)
WEBSOCKET: Final = "WEBSOCKET"


@contextmanager
def variables(switches: Iterable[str]) -> Iterator[None]:
    """Set the switches that are variables for the body, and unset the others."""
    before = dict(os.environ)
    os.environ |= {name: "1" if name in switches else "0" for name in VARIABLES}
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
    for flag in FLAGS:
        setattr(read, flag.removeprefix("--").replace("-", "_"), flag in switches)
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


def laid_out(built: tuple[Sequence[str], Sequence[str]]) -> Mapping[str, tuple[set[str], str]]:
    """Return the routes of the application with these tasks and switches."""
    return routes(application(*built))


def record() -> tuple[str, list[dict[str, object]]]:
    """Return the installed release (major.minor) and a row for each route."""
    import vllm.entrypoints.launchers.app  # noqa: F401, PLC0415 - once, before the processes
    from vllm.version import __version__  # noqa: PLC0415

    rest = [tuple(name for name in SWITCHES if name != switch) for switch in SWITCHES]
    wanted = [
        (TASKS, SWITCHES),
        *((TASKS, some) for some in rest),
        *(([task], SWITCHES) for task in TASKS),
    ]
    # A process for each: modules keep the routes that an earlier application had.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        everything, *found = pool.map(laid_out, wanted, chunksize=1)
    by_switch = dict(zip(SWITCHES, found, strict=False))
    by_task = dict(zip(TASKS, found[len(SWITCHES) :], strict=True))
    rows: list[dict[str, object]] = []
    for path, (methods, module) in sorted(everything.items()):
        needs = [name for name, some in by_switch.items() if _is_less(some.get(path), module)]
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
    return store(FOLDER / f"{release}.json", f"[\n{lines}\n]\n")


if __name__ == "__main__":
    sys.exit(main())
