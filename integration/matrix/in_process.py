"""Rows of the matrix without a server: vLLM in this process, one fork for each row.

    python -m integration.matrix.in_process NAME...

Prints one JSON object for each: Transformers' greedy tokens, and those of vLLM with the arguments
that our server gives it. Seconds where `make matrix` takes a minute, for tests and mutations.
"""

import gc
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

if __name__ == "__main__":  # before vLLM and torch look; pytest imports this file, too
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # the server logs by itself, too

import torch
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.online import base as _base  # noqa: F401 - here once,
from vllm.v1.worker import cpu_worker as _cpu_worker  # noqa: F401 - and not in each fork

from integration.matrix.checkpoints import ARCHITECTURES, Architecture, build
from integration.matrix.run import NEW_TOKENS, OPTIONS, PROMPT, greedy
from lmi_vllm.config.model_source import locate_model
from lmi_vllm.engine.vllm.processes import register_models
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate
from tests.support.vllm_namespace import namespace_of

_ENDS_WITH_THE_FORK: list[LLM] = []  # its shutdown collects garbage for a second


def compared(row: Architecture, folder: Path) -> dict[str, object]:
    """Both answers to one prompt."""
    reference = build(row, folder)
    ids = reference.tokenizer(PROMPT)["input_ids"]
    expected, _ = greedy(reference.model, {"input_ids": torch.tensor([ids])})
    environ = {**OPTIONS, **row.options, "HF_MODEL_ID": str(folder)}
    settings = load_settings(environ)
    model = locate_model(settings, environ)
    found = translate(settings, model, Devices())
    if found.errors:
        raise ConfigurationError(found.errors)
    arguments = found.arguments
    register_models()
    parsed = namespace_of(arguments.values)
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parsed))
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    (answer,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    seen = list(answer.outputs[0].token_ids)
    _ENDS_WITH_THE_FORK.append(llm)
    return {"name": row.name, "expected": expected, "seen": seen}


def _child(row: Architecture) -> dict[str, object]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            return compared(row, Path(folder) / "model")
    except Exception:  # noqa: BLE001 - whatever it was stands in the answer
        return {"name": row.name, "error": traceback.format_exc()}


def main(names: list[str]) -> int:
    """Run them one after the other."""
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM prints, too
    rows = {row.name: row for row in ARCHITECTURES}
    gc.freeze()  # a collection in a fork would go through, and copy, all that is imported
    for name in names:
        child = os.fork()
        if child == 0:
            os.write(out, (json.dumps(_child(rows[name])) + "\n").encode())
            os._exit(0)
        os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
