"""Secure mode on a real process: a refused start names all that is wrong, a good one serves.

Adapters at run time are refused with 400 and the reason.
"""

import shutil
from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.adapter_files import copy_adapter

CONTROLS = (
    "DISALLOW_TRUST_REMOTE_CODE,DISALLOW_CUSTOM_INFERENCE_SCRIPTS,DISALLOW_REQUIREMENTS_TXT,"
    "DISALLOW_PICKLE_FILES,DISALLOW_CHAT_TEMPLATE"
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A model directory as the platform mounts it, without anything forbidden."""
    folder = tmp_path / "model"
    shutil.copytree(
        DEMO_MODEL_DIR,
        folder,
        ignore=shutil.ignore_patterns(
            "serving.properties", "chat_template*", "*.py", "__pycache__"
        ),
    )
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).is_file()
    return folder


def environment(store: Path, controls: str = CONTROLS) -> dict[str, str]:
    """What SageMaker sets."""
    return {
        "SERVING_MODEL_STORE": str(store),
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": controls,
        "SAGEMAKER_UNTRUSTED_CHANNELS": str(store),
        "OPTION_DTYPE": "fp32",
        "OPTION_ENFORCE_EAGER": "true",
        "OPTION_MAX_MODEL_LEN": "512",
        "OPTION_GPU_MEMORY_UTILIZATION": "0.05",
        "OPTION_ENABLE_LORA": "true",
    }


def test_secure_mode_refuses_a_start_with_every_reason(
    server_process: StartServer, store: Path
) -> None:
    """Exit code 1; the last line names each violation, and no engine was started for it."""
    (store / "model.py").write_text("")
    (store / "requirements.txt").write_text("anything\n")
    (store / "weights.bin").write_text("")
    (store / "chat_template.jinja").write_text("")
    environ = environment(store) | {"OPTION_TRUST_REMOTE_CODE": "true", "LMI_CUSTOM_CODE": "none"}
    environ |= {"OPTION_TOKENIZER_MODE": "auto"}
    server = server_process("--port", "0", environ=environ)
    assert server.wait_exit(60) == 1, server.describe()
    reason = server.stderr.strip().splitlines()[-1]
    names = ("model.py", "requirements.txt", "weights.bin", "chat_template.jinja")
    variables = ("OPTION_TOKENIZER_MODE", "OPTION_TRUST_REMOTE_CODE")
    for part in (*names, *variables, *CONTROLS.split(",")):
        assert part in reason, (part, reason)
    assert "installing" not in server.stderr


@pytest.mark.vllm
def test_secure_mode_serves_a_clean_model_and_refuses_bad_adapters(
    server_process: StartServer, store: Path
) -> None:
    """A clean model starts with all controls on; an adapter with a pickle is 400."""
    server = server_process("--port", "0", environ=environment(store), is_forked=True)
    url = server.url_when_ready()
    bad = copy_adapter(store / "later" / "bad")
    (bad / "optimizer.pt").write_text("")
    answer = call(url, f"/adapters?name=bad&src={bad}", {})
    assert answer.status == 400, answer
    assert "optimizer.pt is forbidden by DISALLOW_PICKLE_FILES" in answer.body.decode()
    outside = copy_adapter(store.parent / "elsewhere")
    answer = call(url, f"/adapters?name=outside&src={outside}", {})
    assert answer.status == 400, answer
    assert "LMI_ADAPTER_ROOTS" in answer.body.decode()
    good = copy_adapter(store / "later" / "good")
    assert call(url, f"/adapters?name=good&src={good}", {}).status == 200
