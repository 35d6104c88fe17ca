"""From the first second the port answers; a failed start says why, last and on one line."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from integration.client import call, wait_until
from integration.conftest import StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.vllm.start_steps import ORDER
from tests.support.slowdown import slowdown

PHASES = ["settings", "download", "engine", "adapters", "warm-up"]


@pytest.mark.vllm
def test_ping_is_503_with_phases_until_a_real_token(server_process: StartServer) -> None:
    """/ping answers within 2 s all through the start: 503 with its phase, then 200.

    Other work on the machine takes time from the server, so the test allows for what it takes here.
    """
    server = server_process("--demo", "--port", "0")
    url = server.wait_listening()
    seen: list[str] = []
    steps: dict[str, None] = {}
    while True:
        before, asked = slowdown(), time.monotonic()
        answer = call(url, "/ping")
        waited = time.monotonic() - asked
        assert waited < 2 * max(before, slowdown())
        if answer.status == 200:
            break
        assert answer.status == 503
        (entry,) = answer.json().values()
        assert entry["status"] == "PENDING"
        assert entry["elapsed_seconds"] >= 0
        steps |= dict.fromkeys([entry["step"]] if "step" in entry else [])
        if entry["phase"] not in seen:
            seen.append(entry["phase"])
            refused = call(url, "/invocations", {"inputs": "x"})
            if refused.status != 200:
                assert refused.status == 503
                assert int(refused.headers["retry-after"]) > 0
                assert refused.json()["type"] == "ServiceUnavailableException"
    assert seen == [phase for phase in PHASES if phase in seen]
    assert "engine" in seen
    assert steps
    assert list(steps) == sorted(steps, key=lambda step: ORDER[step])
    assert answer.json() == {"model": {"status": "Healthy"}}
    server.wait_ready(1)


@pytest.mark.vllm
def test_weights_are_read_while_vllm_is_imported(
    server_process: StartServer, tmp_path: Path
) -> None:
    """They are on the disk alone; once vLLM asks for them they are in memory, with a line of it.

    The second file is of a tensor that vLLM leaves out: it makes the model large.
    """
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, folder, ignore=shutil.ignore_patterns("adapters"))
    count = 80 << 20
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    header = {name: {"dtype": "F32", "shape": [count // 4], "data_offsets": [0, count]}}
    text = json.dumps(header).encode()
    with (folder / "more.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    server = server_process("--model", str(folder), "--port", "0")
    server.url_when_ready()
    (ahead,) = [line for line in server.log if "read_ahead" in line]
    assert ahead["read_ahead"]["bytes"] > count / 2
    (loads,) = [n for n, line in enumerate(server.log) if line.get("step") == "weights"]
    assert server.log.index(ahead) < loads
    (start,) = [line for line in server.log if "step_figures" in line]
    assert start["step_figures"]["weight_files"] == 2
    assert start["step_figures"]["weight_bytes"] > count


@pytest.mark.vllm
def test_local_checkpoint_with_environment_options_is_served(
    server_process: StartServer, tmp_path: Path
) -> None:
    """HF_MODEL_ID names a folder, OPTION_* configure it; the log shows each argument's origin."""
    folder = tmp_path / "tiny-model"
    shutil.copytree(DEMO_MODEL_DIR, folder)
    (folder / "serving.properties").unlink()
    environ = {
        "HF_MODEL_ID": str(folder),
        "OPTION_DTYPE": "fp32",
        "OPTION_MAX_MODEL_LEN": "512",
        "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
        "OPTION_ENFORCE_EAGER": "true",
        "MAX_BATCH_SIZE": "16",
        "SERVING_WAIT_MODEL_LOADING": "true",
    }
    server = server_process("--port", "0", environ=environ, is_forked=True)
    url = server.url_when_ready()
    answer = call(url, "/predictions/tiny_model", {"inputs": "The capital of France is"})
    assert answer.status == 200, answer.body
    assert "Paris" in answer.json()["generated_text"]
    (start,) = [line for line in server.log if "engine_arguments" in line]
    arguments = start["engine_arguments"]
    for name, value, origin in (
        ("dtype", "float32", "OPTION_DTYPE"),
        ("max_model_len", 512, "OPTION_MAX_MODEL_LEN"),
        ("max_num_seqs", 16, "MAX_BATCH_SIZE"),
        ("enforce_eager", True, "OPTION_ENFORCE_EAGER"),
    ):
        assert arguments[name] == {"value": value, "origin": origin}
    assert call(url, "/predictions/other", {"inputs": "x"}).status == 404


def failed_start(
    server_process: StartServer, *arguments: str, is_forked: bool = False, **environ: str
) -> str:
    """Return the last line on stderr of a start that must fail with code 1."""
    words = ("--port", "0", *arguments)
    server = server_process(*words, environ=environ, is_forked=is_forked)
    assert server.wait_exit(120) == 1, server.describe()
    line = server.stderr.splitlines()[-1]
    assert line.startswith("lmi-vllm: error: ")
    return line


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"HF_MODEL_ID": "/tmp", "OPTION_QUANTIZE": "awq", "OPTION_QUANTIZATION": "gptq"},
            ["OPTION_QUANTIZE", "OPTION_QUANTIZATION", "awq", "gptq"],
        ),
        ({"HF_MODEL_ID": "/no/such/folder"}, ["/no/such/folder"]),
        ({"SERVING_JOB_QUEUE_SIZE": "many", "HF_MODEL_ID": "/tmp"}, ["SERVING_JOB_QUEUE_SIZE"]),
        ({}, ["HF_MODEL_ID"]),
        ({"LMI_STRICT": "true", "OPTION_DTIPE": "fp16", "HF_MODEL_ID": "/tmp"}, ["OPTION_DTIPE"]),
    ],
    ids=["conflict", "missing-folder", "bad-number", "no-model", "strict-typo"],
)
def test_bad_configuration_prints_the_cause_as_last_line(
    server_process: StartServer, environ: dict[str, str], words: list[str]
) -> None:
    """A start that configuration makes impossible ends with 1 and one line that names the cause."""
    line = failed_start(server_process, **environ)
    for word in words:
        assert word in line


def test_explain_exits_2_where_serve_exits_1(server_process: StartServer) -> None:
    """`explain` prints everything it knows and exits 2, naming both sides of a conflict."""
    environ = {"OPTION_QUANTIZE": "awq", "OPTION_QUANTIZATION": "gptq", "HF_MODEL_ID": "acme/tiny"}
    explain = server_process("--format", "json", verb="explain", environ=environ)
    assert explain.wait_exit(20) == 2, explain.describe()
    text = ""
    while line := explain.lines.get(timeout=5):
        text += line + "\n"
    (error,) = json.loads(text)["errors"]
    assert "OPTION_QUANTIZE" in error
    assert "OPTION_QUANTIZATION" in error


@pytest.mark.vllm
def test_engine_refusal_names_its_root_cause(server_process: StartServer, tmp_path: Path) -> None:
    """What only vLLM can see fails the start with vLLM's own reason, not "see above"."""
    folder = tmp_path / "broken"
    shutil.copytree(DEMO_MODEL_DIR, folder)
    (folder / "serving.properties").write_text("option.dtype=fp32\noption.enforce_eager=true\n")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1  # whose weights are not there
    (folder / "config.json").write_text(json.dumps(config))
    line = failed_start(server_process, is_forked=True, HF_MODEL_ID=str(folder))
    assert "the engine did not start" in line
    assert "see above" not in line.lower()


@pytest.mark.vllm
def test_argument_refused_by_installed_vllm_ends_the_start(server_process: StartServer) -> None:
    """A value that the installed vLLM refuses ends the start with its words and the option."""
    environ = {"OPTION_ATTENTION_BACKEND": "NOT_A_BACKEND"}
    line = failed_start(server_process, "--demo", is_forked=True, **environ)
    assert "NOT_A_BACKEND" in line
    assert "attention_backend from OPTION_ATTENTION_BACKEND" in line


CACHE_MADE, ADAPTERS_LOADED = "init engine (profile", "json was trained on"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("said", "pause"),
    [(CACHE_MADE, 0.0), (CACHE_MADE, 0.05), (ADAPTERS_LOADED, 0.3)],
    ids=["cache made", "a moment later", "front ends join"],
)
@pytest.mark.parametrize("front_ends", ["1", "3"])
def test_core_that_is_killed_late_in_a_start_is_said(
    server_process: StartServer, front_ends: str, said: str, pause: float
) -> None:
    """Where no handshake is waited for any more, and no request is served yet: as an OOM kill."""
    environ = {"LMI_FRONTEND_PROCESSES": front_ends}
    server = server_process("--demo", "--port", "0", environ=environ)
    assert wait_until(lambda: said in server.stderr_path.read_text(errors="replace"), 90)
    time.sleep(pause)
    for process in server.children():
        if "EngineCore" in " ".join(process.cmdline()):
            process.kill()
    assert server.wait_exit(25) == 1, server.describe()
    last = server.stderr.splitlines()[-1]
    assert last.startswith("lmi-vllm: error: the engine "), last  # did not start, or cannot answer
    assert last.endswith("killed by SIGKILL"), last
    assert "hangs" not in server.stderr


def test_any_address_is_ipv4_and_ipv6(server_process: StartServer) -> None:
    """`--host ::`, as vLLM has it."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    words = ("--demo", "--engine", "scripted", "--host", "::", "--port", "0")
    port = server_process(*words).url_when_ready(60).rpartition(":")[2]
    for host in ("127.0.0.1", "::1"):
        with socket.create_connection((host, int(port)), 10):
            pass


def test_port_in_use_is_a_failed_start(server_process: StartServer) -> None:
    """A busy port ends the start with 1 and names the address."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        server = server_process("--demo", "--engine", "scripted", "--port", port)
        assert server.wait_exit(20) == 1
        assert f":{port}" in server.stderr.splitlines()[-1] or port in server.stderr


def test_memory_that_must_stay_free_is_looked_at_before_anything(
    server_process: StartServer,
) -> None:
    """Too little memory ends the start with every number, before vLLM is imported."""
    server = server_process(
        "--demo", "--port", "0", environ={"SERVING_RESERVED_MEMORY_MB": "99999999"}
    )
    assert server.wait_exit(20) == 1
    last = server.stderr.splitlines()[-1]
    assert "reserved_memory_mb (SERVING_RESERVED_MEMORY_MB): not enough memory" in last
    assert "MiB are available" in last


@pytest.mark.parametrize(
    ("way", "form"),
    [("variable", "file:{}"), ("file", "file://localhost{}/"), ("list", "file://{}")],
)
def test_file_urls_name_a_model(
    server_process: StartServer, tmp_path: Path, way: str, form: str
) -> None:
    """As LMI's tests write them: HF_MODEL_ID, option.model_id of a store, and `-m name=url`."""
    folder, store = tmp_path / "tiny-model", tmp_path / "store"
    shutil.copytree(DEMO_MODEL_DIR, folder)
    store.mkdir()
    url, arguments, environ = form.format(folder), ["-s", str(store)], {}
    if way == "variable":
        environ["HF_MODEL_ID"] = url
    elif way == "file":
        (store / "serving.properties").write_text(f"option.model_id={url}\n", encoding="utf-8")
    else:
        arguments += ["-m", f"test={url}"]
    server = server_process(*arguments, "--port", "0", "--engine", "scripted", environ=environ)
    ready = server.url_when_ready()
    [model] = call(ready, "/models").json()["models"]
    assert model["status"] == "READY"
    assert model["modelUrl"].rstrip("/") == str(folder)
    if way == "list":
        assert model["modelName"] == "test"
    assert call(ready, f"/predictions/{model['modelName']}", {"inputs": "x"}).status == 200
