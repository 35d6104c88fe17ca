"""A sample of `make matrix`: classes of vLLM and its Transformers backend, our mappings, pictures.

Every answer has the token ids of Transformers' own greedy generation for the same checkpoint.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from integration.matrix.checkpoints import ARCHITECTURES, Architecture
from integration.matrix.page import how
from integration.matrix.run import run
from integration.package_copies import NoPackageError, torchvision_copy

pytestmark = pytest.mark.vllm
SAMPLE = {
    "starcoder2": "Transformers backend (`TransformersForCausalLM`)",
    "internlm": "mapping: `InternLMForCausalLM` is served as `LlamaForCausalLM`",
    "qwen": "mapping: `QWenLMHeadModel` is served as `LmiQwenForCausalLM`",
    "deepseek": "vLLM's own class (`DeepseekV3ForCausalLM`)",
}
# With a picture in the messages of LMI's own request, and the fewest tokens that are compared.
SEEING = {
    "pixtral": ("vLLM's own class (`LlavaForConditionalGeneration`)", 40),
    "qwen3_vl": ("vLLM's own class (`Qwen3VLForConditionalGeneration`)", 26),
}
# Transformers looks for torchvision once, so it has to be on the path before: in a process apart.
COMPARE = """
import json, pathlib, sys
from dataclasses import asdict
from integration.matrix import checkpoints, run
row = next(row for row in checkpoints.ARCHITECTURES if row.name == sys.argv[1])
print(json.dumps(asdict(run.run(row, pathlib.Path(sys.argv[2])))))
"""
ROWS = [row for row in ARCHITECTURES if row.name in SAMPLE]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_model_matches_transformers(row: Architecture, tmp_path: Path) -> None:
    """LMI and chat payloads, streamed and not; four times the same twelve tokens."""
    outcome = run(row, tmp_path)
    assert outcome.error == ""
    assert outcome.tokens >= 40
    assert how({"mapping": outcome.mapping, "served_as": outcome.served_as}) == SAMPLE[row.name]


@pytest.mark.parametrize("name", SEEING)
def test_vision_model_matches_transformers(name: str, tmp_path: Path) -> None:
    """The same with a picture, which is seen: the answer of Transformers to another one differs."""
    served_as, least_tokens = SEEING[name]
    try:
        torchvision = torchvision_copy()
    except NoPackageError as error:
        pytest.skip(str(error))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(torchvision), *sys.path])}
    command = [sys.executable, "-c", COMPARE, name, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["error"] == ""
    assert outcome["tokens"] >= least_tokens
    assert how(outcome) == served_as
