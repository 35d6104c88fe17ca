"""The other Pythons that are claimed: a wheel installed by a user into a distribution that has one.

Each is a root of debootstrap with its own Python. There an ordinary user makes an environment and
installs `lmi-vllm[cpu]` from a wheel, and what the tests need. Each takes 6 GB and half an hour, so
it runs only with LMI_TEST_PYTHONS=1, or for one Python with LMI_TEST_PYTHONS=3.13.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from integration import bare_machine
from integration.bare_machine import HOME, ROOT, USER, Machine, Release, serving, with_packages
from integration.client import call

ASKED = os.environ.get("LMI_TEST_PYTHONS", "")
# vLLM imports soundfile, one of the tests' packages, and ends without its library.
PACKAGES = "python3-venv,git,make,ca-certificates,libnuma1,libsndfile1"
VENV = f"{HOME}/venv"
RELEASES = {
    "3.12": Release(
        "noble",
        "http://archive.ubuntu.com/ubuntu",
        PACKAGES,
        f"{VENV}/bin",
        ("--components=main,universe",),  # python3-venv is in universe
        "/usr/share/debootstrap/scripts/gutsy",  # every Ubuntu's; Debian 12 has no name for noble
    ),
    "3.13": Release("trixie", "http://deb.debian.org/debian", PACKAGES, f"{VENV}/bin"),
}

pytestmark = [
    *bare_machine.pytestmark,
    pytest.mark.skipif(not ASKED, reason="needs LMI_TEST_PYTHONS=1"),
]


@pytest.fixture(scope="module", params=RELEASES)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Return a root with this Python, and the wheel installed in the user's environment."""
    version = request.param
    if ASKED not in ("1", version):
        pytest.skip(f"LMI_TEST_PYTHONS={ASKED}")
    folder = tmp_path_factory.mktemp(f"python-{version}")
    wheels = folder / "wheels"
    # Out of the sdist: a wheel made of the checkout takes what an earlier one left in build/lib.
    build = [sys.executable, "-m", "build", "--outdir", wheels, ROOT]
    subprocess.run(build, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    machine = with_packages(folder, RELEASES[version])
    environ = {"UV_INDEX_STRATEGY": "unsafe-best-match", **machine.environ}
    if certificates := machine.environ.get("PIP_CERT"):
        environ["SSL_CERT_FILE"] = certificates
    machine = replace(machine, environ=environ)
    (wheel,) = wheels.glob("*.whl")
    shutil.copy(wheel, machine.root / HOME[1:])
    os.chown(machine.root / HOME[1:] / wheel.name, USER, USER)
    _succeeds(machine, "/usr/bin/python3", "-m", "venv", VENV)
    _succeeds(machine, "pip", "install", "uv")
    (machine.root / HOME[1:] / "overrides.txt").write_text(f"torch=={_torch()}\n")
    more = ("--override", f"{HOME}/overrides.txt")
    _succeeds(machine, "uv", "pip", "install", f"{HOME}/{wheel.name}[cpu,otel,dev]", *more)
    said = _succeeds(machine, "python", "--version")
    assert said.split()[1].startswith(f"{version}.")
    return machine


def _torch() -> str:
    """Return torch's release here; as it is where its own index is named."""
    found = importlib.metadata.version("torch")
    return found if "PIP_INDEX_URL" in os.environ else found.partition("+")[0]


def _succeeds(machine: Machine, *words: str) -> str:
    done = machine.run(*words)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def test_the_wheel_serves(machine: Machine, tmp_path: Path) -> None:
    """The requests of README and quick start: LMI's, whole and streamed, and OpenAI's."""
    words = ("lmi-vllm", "serve", "--demo", "--port", "0")
    prompt = {"inputs": "The capital of France is"}
    chat = {
        "model": "json",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    with serving(machine, tmp_path, words) as url:
        whole = call(url, "/invocations", prompt)
        rows = call(url, "/invocations", prompt | {"stream": True}).lines()
        answer = call(url, "/v1/chat/completions", chat).json()
    text = " Paris. The city lies on the river Seine."
    assert whole.json() == {"generated_text": text}
    assert rows[-1]["generated_text"] == text
    said = answer["choices"][0]["message"]["content"]
    assert said == '{"answer": "The capital of France is Paris."}'


def _passes(machine: Machine, *words: str) -> None:
    """Run tests, and print how many passed."""
    said = _succeeds(machine, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *words)
    print(next(line for line in reversed(said.splitlines()) if " passed" in line))


def test_requests_without_the_engine_pass(machine: Machine) -> None:
    """Unit, web and server tests."""
    _passes(machine, "-n", "2", "tests/unit", "tests/web", "tests/server")


def test_contract_holds(machine: Machine) -> None:
    """The engine's promises, on the real one."""
    _passes(machine, "tests/contract")
