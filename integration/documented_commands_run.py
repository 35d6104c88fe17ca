"""Every command of the documentation, run as written beside a server of the embedded model.

Blocks of one page share a folder and run in order, as a reader would. What a command is shown to
print is compared: byte for byte but for ids and times; `<!-- figures vary -->` before a block lets
its numbers differ, `<!-- output varies -->` asks for exit code 0 alone, and `...` is any text.
`make` runs with `-n` (CI runs the targets themselves); `lmi-vllm serve --demo` is the server that
is running already.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from integration.conftest import RunningServer
from tests.support.documentation import ROOT, Block, every_block, steps_of

# What differs from one answer to the next in vLLM's own bytes.
VOLATILE = re.compile(r'"(id":"(?:chatcmpl|cmpl)-[^"]*|created":\d+|system_fingerprint":"[^"]*)"?')
# What `explain` adds on a machine that cannot compile for the CPU, which the pages do not show.
NO_COMPILER = re.compile(r"^  this system lacks .* with which vLLM compiles a model .*\n", re.M)
NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
ADDRESS = re.compile(r"(localhost|127\.0\.0\.1):8080")
SERVERS = {"lmi-vllm serve --demo": "demo_server"}
TGI_PAGE = "docs/from-tgi.md"
SERVED_BY = {TGI_PAGE: "tgi_server"}  # page -> fixture; the others ask the plain demo
LENT = ("config", "docs", "Makefile", "scripts")  # what pages name from the repository's root
BLOCKS = [block for block in every_block() if block.is_run]
SECONDS = 120

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.random_order(disabled=True),  # commands of a page follow each other
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """One scratch folder for each page, with the repository's files that pages name."""
    found = {}
    for page in {block.page for block in BLOCKS}:
        folder = found[page] = tmp_path_factory.mktemp(Path(page).stem)
        for name in LENT:
            (folder / name).symlink_to(ROOT / name)
        programs = folder / ".bin"
        programs.mkdir()
        (programs / "lmi-vllm").write_text(f'#!/bin/sh\nexec {sys.executable} -m lmi_vllm "$@"\n')
        (programs / "lmi-vllm").chmod(0o755)
    return found


# A busy server may send all tokens of each answer at once: nothing to measure lies between them.
ALL_AT_ONCE = re.compile(r"^time per output token +0\.0 ", re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_command_runs_and_prints_the_shown_output(
    block: Block, folders: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """Exit code 0 unless an error is shown, and the shown output."""
    if re.search(r"\bcurl\b", block.text) and shutil.which("curl", path=os.defpath) is None:
        pytest.skip("needs curl, which a bare machine lacks")
    server = request.getfixturevalue(SERVED_BY.get(block.page, "demo_server"))
    folder = folders[block.page]
    if block.language == "python":
        run([sys.executable, "-c", here(block.text, server)], folder)
        return
    if block.language == "sh":
        run(["bash", "-euc", dry(here(block.text, server))], folder)
        return
    for step in steps_of(block):
        if step.command.endswith("lmi-vllm serve --demo"):
            compare("\n".join(server.process.seen), step.shown, block, server)
            continue
        script = dry(here(step.command, server))
        may_fail = re.search(r"error:|^Errors", step.shown, re.MULTILINE) is not None
        printed, reported = run(["bash", "-uc", script], folder, may_fail=may_fail)
        if block.note != "figures vary":  # a slow run reports its progress there
            printed += reported
        elif ALL_AT_ONCE.search(printed):
            printed, _ = run(["bash", "-uc", script], folder, may_fail=may_fail)
        compare(printed, step.shown, block, server)


def here(text: str, server: RunningServer) -> str:
    """Return a text with the address of the running server in place of the documented one."""
    return ADDRESS.sub(urlsplit(server.url).netloc, text)


def dry(script: str) -> str:
    """Return a script whose targets of make are only shown."""
    return re.sub(r"^make ", "make -n ", script, flags=re.MULTILINE)


def run(command: list[str], folder: Path, *, may_fail: bool = False) -> tuple[str, str]:
    """Run in a page's folder as its reader would; return stdout and stderr."""
    path = os.pathsep.join([str(folder / ".bin"), str(Path(sys.executable).parent), os.defpath])
    environ = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert may_fail or done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout, done.stderr


def compare(printed: str, shown: str, block: Block, server: RunningServer) -> None:
    """Hold what was printed against the page."""
    if block.note == "output varies" or not shown.strip():
        return
    printed = NO_COMPILER.sub("", printed)
    texts = [VOLATILE.sub("", text.replace(urlsplit(server.url).netloc, "localhost:8080"))
             for text in (printed, shown.replace("127.0.0.1:8080", "localhost:8080"))]  # fmt: skip
    if block.note == "figures vary":
        texts = [" ".join(NUMBERS.sub("#", text).split()) for text in texts]
    found, wanted = (text.strip() for text in texts)
    if "..." not in wanted:
        assert found == wanted
        return
    pattern = ".*".join(re.escape(part.strip()) for part in wanted.split("..."))
    assert re.fullmatch(pattern, found, re.DOTALL), found
