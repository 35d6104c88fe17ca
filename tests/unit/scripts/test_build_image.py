"""`make image`: which program builds, and what it is told."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/build_image.sh"


def build(folder: Path, tools: dict[str, int], kind: str = "cpu") -> tuple[int, str, str]:
    """Run the script where only these programs are; each ends with the code that is given."""
    for name, code in tools.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\necho ran {name} $*\n[ $1 != info ] || exit {code}\n")
        program.chmod(0o755)
    command = ["/bin/sh", str(SCRIPT), kind, "a:b"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": str(folder)}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"docker": 0, "podman": 0}, "docker build"),
        ({"docker": 1, "podman": 0}, "podman build --format docker"),  # no daemon
        ({"docker": 1, "buildah": 0}, "buildah bud --format docker"),
    ],
)
def test_first_that_works_builds(tmp_path: Path, tools: dict[str, int], words: str) -> None:
    """A client of Docker without its daemon is none."""
    code, printed, _ = build(tmp_path, tools)
    assert code == 0
    assert f"ran {words} -f config/docker/Dockerfile.cpu -t a:b ." in printed


@pytest.mark.parametrize(
    ("kind", "code", "error"),
    [("cpu", 1, "neither a running docker nor podman"), ("rocm", 2, "KIND is cuda or cpu")],
)
def test_error_says_what_is_missing(tmp_path: Path, kind: str, code: int, error: str) -> None:
    """Nothing is built."""
    found, _, text = build(tmp_path, {"docker": 1}, kind)
    assert (found, error in text) == (code, True)
