"""scripts/vllm_changes.py: what of a vLLM release touches us, read without importing it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLD = {
    "__init__.py": "",
    "sampling_params.py": "class SamplingParams:\n    n: int = 1\n    best_of: int = 1\n",
    "engine/arg_utils.py": (
        "class EngineArgs:\n    swap_space: int = 4\n    seed: int = 0\n"
        "class AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\n"
    ),
    "logprobs.py": "from vllm.elsewhere import Logprob\n",
    "elsewhere.py": "class Logprob:\n    def __init__(self, logprob): ...\n",
    "model_executor/models/registry.py": "_MODELS = {'OldForCausalLM': 1, 'Kept': 1}\n",
    "model_executor/layers/quantization/__init__.py": "QuantizationMethods = Literal['awq']\n",
}
NEW = OLD | {
    "sampling_params.py": "class SamplingParams:\n    n: int = 2\n    min_p: float = 0.0\n",
    "engine/arg_utils.py": (
        "class EngineArgs:\n    seed: int = 0\n"
        "class AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\n"
    ),
    "elsewhere.py": "class Logprob:\n    def __init__(self, logprob, rank): ...\n",
    "model_executor/models/registry.py": "_MODELS = {'Kept': 1, 'NewForCausalLM': 1}\n",
}


def package(folder: Path, files: dict[str, str]) -> str:
    """Write a vLLM that is read and never run."""
    for name, text in files.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(folder)


def report(old: str, new: str) -> tuple[int, list[str]]:
    """The exit code and the lines printed."""
    done = subprocess.run(
        [sys.executable, "scripts/vllm_changes.py", old, new],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.returncode, [line.strip() for line in done.stdout.splitlines()]


def test_fields_signatures_and_models_are_compared(tmp_path: Path) -> None:
    """Arguments and sampling fields that came, went and changed; classes behind re-exports."""
    code, lines = report(package(tmp_path / "a", OLD), package(tmp_path / "b", NEW))
    assert code == 0
    for expected in (
        "- swap_space (was 4)",
        "~ n: 1 -> 2",
        "- best_of (was 1)",
        "+ min_p = 0.0",
        "~ Logprob.__init__: def __init__(self, logprob) -> def __init__(self, logprob, rank)",
        "- OldForCausalLM",
        "+ NewForCausalLM",
        "Quantization methods: nothing changed",
    ):
        assert expected in lines


def test_import_of_ours_that_is_gone_is_named(tmp_path: Path) -> None:
    """With the file that has it; the exit code is 1."""
    moved = {name: text for name, text in NEW.items() if name != "logprobs.py"}
    code, lines = report(package(tmp_path / "a", OLD), package(tmp_path / "b", moved))
    assert code == 1
    assert any(line.startswith("- vllm.logprobs Logprob  (vllm_") for line in lines)
