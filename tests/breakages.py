"""Twenty promises, broken one at a time in a throw-away copy of the project: which test notices?

`python -m tests.breakages [NAME ...]` prints one row of tests/README.md for each. A breakage that
no test notices is an error. Ten are of the product, ten of SECURITY.md's table.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Breakage:
    """What is changed in the one module that has it, and the tests that are to notice."""

    name: str
    old: str
    new: str
    tests: str


# fmt: off
BREAKAGES: Final = (
    Breakage("the environment wins over serving.properties for model keys",
        "        file=of_file(file),\n"
        "        # The embedded model has no revision on the hub.\n"
        "        hub=_variables({} if command_line.demo else environ, HUB_VARIABLES, "
        "OriginKind.HUB),\n        options=option_variables(environ, table),",
        "        options=option_variables(environ, table),\n"
        "        hub=_variables(environ, HUB_VARIABLES, OriginKind.HUB),\n"
        "        file=of_file(file),",
        "tests/unit/config/test_precedence.py"),
    Breakage("one restart more than retry_threshold",
        "(failures := failures + 1) <= self", "(failures := failures + 1) <= 1 + self",
        "tests/server/test_failures.py"),
    Breakage("a drain waits for nothing",
        "seconds = self._settings.server.shutdown_timeout", "seconds = 0.0",
        "tests/server/test_drain.py"),
    Breakage("max means every GPU for each stage of the pipeline",
        "most = max(1, gpus // pipeline)", "most = max(1, gpus)",
        "tests/unit/translate/test_parallel.py"),
    Breakage("rows of a stream end with two line ends",
        'before=b"", after=b"\\n")', 'before=b"", after=b"\\n\\n")',
        "tests/unit/inference/test_formatters.py tests/unit/inference/test_golden.py"),
    Breakage("a stream that ends closes and releases nothing",
        "            await close_iterator(self._rows)\n        finally:\n"
        "            await self._release()",
        "            pass\n        finally:\n            pass",
        "tests/web/test_streams.py integration/client_disconnect_aborts_generation.py"),
    Breakage("a killed engine is left as a zombie",
        "        await asyncio.to_thread(self._llm.kill, KILL_SECONDS)  "
        "# vLLM kills, and leaves zombies\n", "",
        "integration/models_are_registered_over_http.py"),
    Breakage("requests are counted as disconnected",
        "response is None or request.transport is None else response.status\n",
        "True else response.status\n",
        "tests/web/test_metrics.py"),
    Breakage("an adapter is unloaded under its requests",
        "await self._loads.unload(adapter.ref, timeout_seconds)\n            except",
        "await self._loads.unload(adapter.ref, 0.0)\n            except",
        "tests/unit/adapters tests/unit/features/management/test_adapter_routes.py"),
    Breakage("/ping is 200 while the engine restarts",
        "        self._service.lifecycle.begin_restart()\n", "",
        "tests/server/test_failures.py"),
    Breakage("security: any key opens every route",
        "            if hmac.compare_digest(shown, key.encode()):", "            if shown:",
        "integration/tls_and_management.py tests/web"),
    Breakage("security: a page of another site may post",
        'not in _OWN_SITE', 'not in (*_OWN_SITE, "cross-site")',
        "tests/unit/features/console/test_routes.py tests/web"),
    Breakage("security: media are fetched from private addresses",
        "return address.is_global and not is_known", "return not is_known",
        "tests/unit/features/media_urls"),
    Breakage("security: an archive leaves its folder",
        'if pure.is_absolute() or ".." in pure.parts or', "if pure.is_absolute() or",
        "tests/unit/sources/test_archives.py"),
    Breakage("security: an adapter of NaN is taken",
        "if not largest <= LARGEST_NUMBER:", "if largest > LARGEST_NUMBER:",
        "tests/unit/checks/test_adapter_weights.py"),
    Breakage("security: code from a folder that others may write",
        "if mode & stat.S_IWOTH and not is_scratch:", "if False:",
        "tests/unit/checks/test_predictable_folders.py tests/unit/adapters"),
    Breakage("security: a log that is not read is waited for",
        "            if self._bytes + len(line) > self._most_bytes:",
        "            if self._bytes + len(line) > self._most_bytes "
        "and not self._changed.wait(0.05):",
        "tests/unit/telemetry/test_log_handler.py"),
    Breakage("security: n is not bounded",
        "if count is not None and count > limits.max_sequences:", "if False:",
        "tests/unit/inference/test_limits.py"),
    Breakage("security: headers may take for ever",
        '            self._start("LMI_HEADER_TIMEOUT", self._timeouts.header)\n',
        "            pass\n",
        "integration/slow_clients_are_cut_off.py"),
    Breakage("security: a body of a million values is parsed",
        "    check_values(body)\n", "",
        "tests/web/test_limits.py"),
)
# fmt: on


def place(breakage: Breakage, package: Path) -> Path:
    """Return the module of the package that has what is changed, wherever it was moved.

    Raises:
        ValueError: none has, or it is there more than once.
    """
    modules = [path for path in package.rglob("*.py") if breakage.old in path.read_text("utf-8")]
    if len(modules) != 1 or modules[0].read_text("utf-8").count(breakage.old) != 1:
        raise ValueError(f"{breakage.name}: found in {modules}; look for its place")
    return modules[0]


def noticed(breakage: Breakage, copy: Path) -> list[str]:
    """Return the tests that fail in a copy of the project that is broken so."""
    module = place(breakage, copy / "lmi_vllm")
    whole = module.read_text(encoding="utf-8")
    module.write_text(whole.replace(breakage.old, breakage.new), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider",
             "--maxfail=3", *breakage.tests.split()],
            cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        module.write_text(whole, encoding="utf-8")
    lines = (line.partition(" - ")[0].partition(" ") for line in done.stdout.splitlines())
    return [test for word, _, test in lines if word in ("FAILED", "ERROR") and "::" in test]


def main(names: Collection[str]) -> int:
    """Break them one after the other; returns how many nothing noticed."""
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="lmi-vllm-broken-") as folder:
        copy = Path(folder) / "copy"
        worktree = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*worktree, "add", "-q", "--detach", str(copy)], check=True)
        try:
            for breakage in BREAKAGES:
                if names and breakage.name not in names:
                    continue
                found = noticed(breakage, copy)
                unnoticed += not found
                shown = f"`{found[0]}`" if found else "**nothing**"
                print(f"| {breakage.name} | {shown} |", flush=True)
        finally:
            subprocess.run([*worktree, "remove", "--force", str(copy)], check=True)
    return unnoticed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
