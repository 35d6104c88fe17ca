"""config/docker/Dockerfile.cpu, step by step in a Debian made by debootstrap: it serves and stops.

Four minutes and 3 GB, so only where asked: LMI_TEST_IMAGE=1 (and debootstrap, and root).
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.client import call
from tests.support.image_root import Stage, build, debian_root

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "config" / "docker" / "Dockerfile.cpu"
USER = 1234  # no such user in the image

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not os.environ.get("LMI_TEST_IMAGE"), reason="needs LMI_TEST_IMAGE=1"),
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="needs debootstrap"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: debootstrap and chroot"),
]


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Stage]:
    """The image's root after every step of its Dockerfile, with what containers mount."""
    context = tmp_path / "context"
    release = [sys.executable, "scripts/make_release.py", "--draft"]
    subprocess.run(release, cwd=ROOT, check=True)
    shutil.copytree(ROOT / "dist", context / "dist")
    shutil.copytree(ROOT / "config", context / "config")
    shutil.copy(ROOT / "LICENSE", context)
    lent = {
        "PIP_FIND_LINKS": "/lent/wheels",
        "PIP_CERT": "/lent/ca.crt",
        "TORCH_INDEX": os.environ.get("LMI_TEST_TORCH_INDEX", "https://pypi.org/simple"),
    }
    built = build(DOCKERFILE, context, debian_root(tmp_path), tmp_path, lent)
    mounts = {
        built.root / "proc": ["--bind", "/proc"],
        built.root / "sys": ["--bind", "-o", "ro", "/sys"],  # lscpu, which vLLM asks, reads it
        built.root / "dev/shm": ["-t", "tmpfs", "x"],
    }
    for place, what in mounts.items():
        place.mkdir(exist_ok=True)
        subprocess.run(["mount", *what, place], check=True)
    yield built
    for place in mounts:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_the_image_serves_as_any_user_is_healthy_and_ends_on_sigterm(
    image: Stage, tmp_path: Path
) -> None:
    """The exact entry point and command, as a user without a name; its exit codes are passed on."""
    environ = image.environ | {"SERVING_INFERENCE_ADDRESS": "http://127.0.0.1:18080"}
    chroot = ["chroot", f"--userspec={USER}:{USER}", str(image.root)]
    health = [*chroot, *image.entry_point, "health"]
    with (tmp_path / "out").open("w") as output:
        command = [*chroot, *image.entry_point, *image.command, "--demo"]
        server = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
    try:
        codes = [subprocess.run(health, env=environ, check=False).returncode]
        while codes[-1] and server.poll() is None:
            codes.append(subprocess.run(health, env=environ, check=False).returncode)
        assert server.poll() is None, (tmp_path / "out").read_text()[-4000:]
        assert codes[0] == 1
        answer = call(
            "http://127.0.0.1:18080", "/invocations", {"inputs": "The capital of France is"}
        )
        assert answer.json() == {"generated_text": " Paris. The city lies on the river Seine."}
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
    words = [*chroot, *image.entry_point, "sh", "-c", "exit 77"]
    assert subprocess.run(words, env=environ, check=False).returncode == 77
    assert (image.root / "licenses/lmi-vllm/LICENSE").is_file()
