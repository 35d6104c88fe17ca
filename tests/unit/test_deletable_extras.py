"""Any extra can be deleted: `explain` says the same and a scripted server answers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Collection
from pathlib import Path

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.package_copies import ENGINE, EXTRAS, package_without

SERVE = ("serve", "--engine", "scripted", "--demo", "--port", "0")
QUESTION = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 1}}).encode()


def start(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start a verb of the package in `folder`, and of no other."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "HOME": str(folder)}
    environ |= variables
    command = [sys.executable, "-W", "error", "-m", "lmi_vllm", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


CASES = [*(pytest.param([name], id=name) for name in EXTRAS), pytest.param(EXTRAS, id="all")]


@pytest.mark.parametrize("names", CASES)
def test_server_works_without(names: Collection[str], tmp_path: Path) -> None:
    """The rest knows nothing of what is gone, down to the exit code after SIGTERM."""
    folder = package_without(names, tmp_path)
    explain = start(folder, "explain", "--demo", "--format", "json")
    server = start(folder, *SERVE)
    try:
        explained, problems = explain.communicate(timeout=60)
        assert explain.returncode == 0, problems
        assert json.loads(explained)["errors"] == []
        listening = next((line for line in server.stdout or () if line.startswith("Ready on ")), "")
        assert listening, server.communicate(timeout=60)
        request = urllib.request.Request(
            f"{listening.split()[2]}/invocations", QUESTION, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "generated_text" in json.load(answer)
        server.send_signal(signal.SIGTERM)
        _, problems = server.communicate(timeout=60)
        assert server.returncode == 0, problems
    finally:
        for process in (explain, server):
            process.kill()
            process.communicate()


def test_state_in_a_store_is_named_where_nothing_shares_it(tmp_path: Path) -> None:
    """Without their extras its URL is neither shared nor taken for a path of this machine."""
    folder = package_without(["adapters_state", "object_stores"], tmp_path)
    server = start(folder, *SERVE, OPTION_ADAPTERS_STATE="s3://bucket/state.json")
    for line in server.stdout or ():
        if line.startswith("Ready on "):
            adapter = next((DEMO_MODEL_DIR / "adapters").iterdir())
            url = f"{line.split()[2]}/adapters?name=own&src={adapter}"
            with urllib.request.urlopen(urllib.request.Request(url, b""), timeout=60) as answer:
                assert answer.status == 200
            server.send_signal(signal.SIGTERM)
    _, problems = server.communicate(timeout=60)
    assert server.returncode == 0, problems
    assert (
        "OPTION_ADAPTERS_STATE has no effect: it needs the extra adapters_state, which" in problems
    )
    assert not (tmp_path / "s3:").exists()


def test_unloaded_code_is_reported(tmp_path: Path) -> None:
    """Without its extra the user's code is refused or warned of, one by one, and never run."""
    missing = "the custom_code extra is not installed"
    model = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))
    settings = "option.enable_lora=true\noption.output_formatter=mine\n"
    (model / "serving.properties").write_text(settings)
    adapter = next(path for path in (model / "adapters").iterdir() if path.is_dir())
    for folder in (model, adapter):
        (folder / "model.py").write_text("raise SystemExit\n")
    words = ("serve", "--engine", "scripted", "--port", "0", "-s", str(model))
    server = start(package_without(["custom_code"], tmp_path / "package"), *words)
    for line in server.stdout or ():
        if line.startswith("Ready on "):
            server.send_signal(signal.SIGTERM)
    _, problems = server.communicate(timeout=60)
    assert server.returncode == 0, problems
    assert f"{model / 'model.py'} is not loaded: {missing}" in problems
    assert f"adapter {adapter.name}: its model.py is not loaded ({missing})" in problems
    assert f"nor a function of model.py ({missing})" in problems
    assert "mine is neither one of json, jsonlines, sse, 3p, 3p_stream, nor" in problems
    (model / "serving.properties").write_text(f"{settings}option.entryPoint=model.py\n")
    server = start(tmp_path / "package", *words)
    _, problems = server.communicate(timeout=60)
    assert server.returncode == 1, problems
    assert "model.py is custom code, which cannot be loaded: " + missing in problems


def test_engine_of_tests_may_go_too(tmp_path: Path) -> None:
    """Then `--engine` takes vLLM alone."""
    folder = package_without([*EXTRAS, ENGINE], tmp_path)
    server = start(folder, *SERVE)
    _, problems = server.communicate(timeout=60)
    assert server.returncode == 2, problems
    assert "invalid choice: 'scripted' (choose from" in problems
    explain = start(folder, "explain", "--demo")
    _, problems = explain.communicate(timeout=60)
    assert explain.returncode == 0, problems


def test_hub_id_is_named_where_there_is_no_hub(tmp_path: Path) -> None:
    """Without its extra an id is not taken for anything else."""
    folder = package_without(["hub"], tmp_path)
    explain = start(folder, "explain", "--model", "acme/tiny", "--format", "json")
    explained, problems = explain.communicate(timeout=60)
    assert explain.returncode == 0, problems
    (warning,) = json.loads(explained)["warnings"]
    assert "'acme/tiny' is no existing path; hub ids need the extra hub, which is not" in warning
