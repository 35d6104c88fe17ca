"""The images of config/docker/, built by buildah and run by podman, over a Debian of debootstrap.

Ten minutes and 8 GB for one of them, so only where asked: LMI_TEST_IMAGES=1 (LMI_TEST_IMAGES=cuda
builds that one too, as far as it goes without a GPU: 45 minutes and 40 GB). Root is needed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.client import call
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.containers import BASE, Containers

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "config" / "docker"
URL = "http://127.0.0.1:18080"
ANY_USER = ("--user", "1234:1234")  # no such user in the image
TOOLS = ("buildah", "podman", "runc", "debootstrap")
GIB = 1 << 30

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not os.environ.get("LMI_TEST_IMAGES"), reason="needs LMI_TEST_IMAGES=1"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: debootstrap and containers"),
    *(
        pytest.mark.skipif(shutil.which(tool) is None, reason=f"needs {tool} (apt-get install)")
        for tool in TOOLS
    ),
]


@pytest.fixture(scope="module")
def containers() -> Iterator[Containers]:
    """Return the storage, with what the Dockerfiles begin with."""
    folder = Path(tempfile.mkdtemp(prefix="lmi-images-"))
    found = Containers(folder)
    root = folder / "debian"
    try:
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], check=True)
        found.make_base(BASE, root)
        yield found
    finally:
        found.remove()


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the Dockerfiles copy from: the repository after `make release`."""
    release = [sys.executable, "scripts/make_release.py", "--draft"]
    subprocess.run(release, cwd=ROOT, check=True)
    folder = tmp_path_factory.mktemp("context")
    for name in ("dist", "config"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "LICENSE", folder)
    return folder


@pytest.fixture(scope="module")
def cpu_image(containers: Containers, context: Path) -> str:
    """Return the tag of the image for machines without a GPU."""
    # torch's own index is not everywhere; where pip looks, +cpu is one of torch's versions here.
    index = os.environ.get("LMI_TEST_TORCH_INDEX", "https://pypi.org/simple")
    return containers.build(
        DOCKER / "Dockerfile.cpu", context, "lmi-vllm:cpu", {"TORCH_INDEX": index}
    )


@pytest.fixture
def served(containers: Containers, cpu_image: str, tmp_path: Path) -> Iterator[str]:
    """Run the default command, read-only and as any user, over a mounted model; its name."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, model)
    words = ["run", "--detach", "--name", "served", "--network", "host", "--read-only", *ANY_USER]
    words += ["--env", f"SERVING_INFERENCE_ADDRESS={URL}", "--health-interval", "disable"]
    words += ["--volume", f"{model}:/opt/ml/model:ro", cpu_image]
    started = containers.podman(*words)
    assert started.returncode == 0, started.stderr
    yield "served"
    containers.podman("rm", "--force", "served")


def state(containers: Containers, name: str, field: str) -> str:
    """One field of a container's state."""
    return containers.podman("inspect", "--format", f"{{{{.State.{field}}}}}", name).stdout.strip()


def test_default_command_serves_and_ends_on_sigterm(containers: Containers, served: str) -> None:
    """Unhealthy while it starts, healthy after a real token, and exit code 0 after the drain."""
    checks = [containers.podman("healthcheck", "run", served).returncode]
    while checks[-1] and state(containers, served, "Status") == "running":
        checks.append(containers.podman("healthcheck", "run", served).returncode)
    logs = containers.podman("logs", served)
    assert checks[-1] == 0, logs.stderr[-4000:]
    answered = [code for code in checks if code != 125]  # podman: over its 5 s
    assert answered[0] == 1
    answer = call(URL, "/invocations", {"inputs": "The capital of France is"})
    assert answer.json() == {"generated_text": " Paris. The city lies on the river Seine."}
    inside = containers.podman("exec", served, "sh", "-c", "id -u; touch /x")
    assert inside.stdout == "1234\n"
    assert "Read-only file system" in inside.stderr
    containers.podman("stop", "--time", "60", served)
    assert state(containers, served, "ExitCode") == "0"


@pytest.mark.parametrize(
    ("words", "code"),
    [(("sh", "-c", "exit 77"), 77), (("serve", "--nonsense"), 2), (("explain", "--demo"), 0)],
)
def test_exit_codes_are_passed_on(
    containers: Containers, cpu_image: str, words: tuple[str, ...], code: int
) -> None:
    """Of any command in the place of `serve`."""
    done = containers.podman("run", "--rm", "--read-only", *ANY_USER, cpu_image, *words)
    assert done.returncode == code, done.stderr


def is_at_most(containers: Containers, tag: str, gib: int) -> None:
    """All layers of an image are below `gib`, of which ours is below 32 MiB."""
    layers = containers.layers(tag)
    for size, instruction in layers:
        print(f"{size / 1e6:8.1f} MB  {instruction[:100]}")
    assert sum(size for size, _ in layers) < gib * GIB
    (ours,) = [size for size, text in layers if "/opt/lmi/bin/pip install --no-c" in text]
    assert ours < 32 << 20


def test_layers_are_as_large_as_documented(containers: Containers, cpu_image: str) -> None:
    """Below 4 GiB, the CPU build of torch included."""
    is_at_most(containers, cpu_image, 4)


@pytest.mark.skipif(
    os.environ.get("LMI_TEST_IMAGES") != "cuda", reason="needs LMI_TEST_IMAGES=cuda"
)
def test_cuda_image_names_the_missing_device(
    containers: Containers, context: Path, tmp_path: Path
) -> None:
    """Every layer but NVIDIA's compatibility libraries; `serve` ends with vLLM's own reason."""
    stub = tmp_path / "cuda" / "usr" / "local" / "cuda" / "compat"
    stub.mkdir(parents=True)
    (stub / "absent").touch()
    containers.make_base("docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04", tmp_path / "cuda")
    tag = containers.build(DOCKER / "Dockerfile.cuda", context, "lmi-vllm:cuda", {})
    is_at_most(containers, tag, 10)
    run = ("run", "--rm", "--network", "host", "--read-only", *ANY_USER, tag)
    for verb in ("explain", "validate"):
        began = time.monotonic()
        done = containers.podman(*run, verb, "--demo")
        print(f"{verb}: {time.monotonic() - began:.1f} s")
        assert done.returncode == 0, done.stderr[-2000:]
    began = time.monotonic()
    ended = containers.podman(*run, "serve", "--demo", "--port", "18081")
    print(f"serve: {time.monotonic() - began:.1f} s, {ended.stderr.splitlines()[-1]}")
    assert ended.returncode == 1
    assert "device" in ended.stderr.splitlines()[-1].lower(), ended.stderr[-2000:]
