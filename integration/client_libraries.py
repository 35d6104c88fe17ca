"""`instructor`, LlamaIndex and `lm-eval` against our process, in an environment of their own.

They pin an older openai than ours. What is installed is named in integration/clients.txt.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from integration.conftest import RunningServer
from integration.environments import environment
from lmi_vllm.demo import DEMO_MODEL_DIR

pytestmark = pytest.mark.vllm
ROOT: Final = Path(__file__).parent.parent
VENV: Final = ROOT / ".venv-clients"
ANSWER: Final = "The capital of France is Paris."
ENVIRON: Final = {
    "PATH": os.environ.get("PATH", ""),
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OPENAI_API_KEY": "none",
}
# Two endings of a sentence that the embedded model knows, and of one that it does not finish so.
QUESTIONS: Final = (
    {"question": "The capital of France is", "choices": ["Paris.", "a cold soup."], "answer": 0},
    {"question": "The capital of Italy is", "choices": ["seven blue.", "Rome."], "answer": 1},
)
TASK: Final = """\
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the clients' environment, made once."""
    return environment(VENV, ROOT / "integration" / "clients.txt")


def _run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=ENVIRON | environ, capture_output=True, text=True, timeout=550, check=False
    )


def _called(python: Path, client: str, server: RunningServer) -> Any:
    program = ROOT / "integration" / "client_calls.py"
    done = _run([str(python), str(program), client, server.url])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_instructor_gets_its_model(demo_server: RunningServer, python: Path) -> None:
    """By a schema that the grammar holds, whole and field after field of a stream."""
    found = _called(python, "instructor", demo_server)
    for name, is_capital in (found["whole"], found["partial"]):
        assert (name in ("Paris", "Rome"), is_capital in (True, False)) == (True, True)


def test_llama_index_chats_and_completes(demo_server: RunningServer, python: Path) -> None:
    """The same text whole and streamed."""
    found = _called(python, "llama_index", demo_server)
    assert found["chat"] == found["chat streamed"] == ANSWER
    assert found["text"] == found["text streamed"]
    assert found["text"].startswith(" Paris.")


def test_lm_eval_ranks_endings(demo_server: RunningServer, python: Path, tmp_path: Path) -> None:
    """Completions that echo the prompt with its log probabilities: the likelier ending is right."""
    data = tmp_path / "capitals.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    (tmp_path / "capitals.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    arguments = (
        f"base_url={demo_server.url}/v1/completions,model=lmi,tokenizer={DEMO_MODEL_DIR},"
        "tokenizer_backend=huggingface,num_concurrent=2,max_retries=1"
    )
    command = [
        str(python), "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments,
        "--include_path", str(tmp_path), "--tasks", "capitals", "--output_path", str(tmp_path),
    ]  # fmt: skip
    done = _run(command, HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = tmp_path.rglob("results_*.json")
    results = json.loads(report.read_text(encoding="utf-8"))["results"]["capitals"]
    assert results["acc,none"] == 1.0
