"""LiteLLM's `sagemaker` and `sagemaker_chat` against our process, each whole and streamed.

LiteLLM pins an older openai and huggingface_hub, so it gets an environment of its own.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from integration.conftest import RunningServer
from integration.environments import environment
from tests.support.sagemaker_proxy import sagemaker_proxy

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parent.parent
VENV = ROOT / ".venv-litellm"
ENVIRON = {
    "PATH": os.environ.get("PATH", ""),
    "PYTHONPATH": str(ROOT),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION_NAME": "us-east-1",
}


@pytest.fixture(scope="module")
def litellm_python() -> Path:
    """The interpreter of an environment with LiteLLM in it, made once."""
    return environment(VENV, ROOT / "integration" / "litellm.txt")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env=ENVIRON, capture_output=True, text=True, timeout=500, check=False
        )
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def test_litellm_over_sagemaker(demo_server: RunningServer, litellm_python: Path) -> None:
    """All four ways give the answer: LMI rows and OpenAI's chunks both pass its decoder.

    The parts of a stream end anywhere, as the service's may: LiteLLM 1.106 lost rows that came in
    one part, which happens whenever the reader is slower than the model.
    """
    with sagemaker_proxy(demo_server.url, part_bytes=300) as url:
        done = _run([str(litellm_python), str(ROOT / "integration" / "litellm_calls.py"), url])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    for name, text in found.items():
        assert "The capital of France is Paris." in text, (name, found)
