"""The entry points of TGI's and LMI's images start this server, with the same words."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi_vllm.cli import parse
from lmi_vllm.commands.explain import command_line_of
from lmi_vllm.config.settings import Settings
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.features.image.__main__ import as_verb
from lmi_vllm.features.image.launchers import as_ours
from tests.support.assembled import OPTIONS, load_settings

ROOT = Path(__file__).parents[4]
MODEL = str(DEMO_MODEL_DIR)


def started(words: list[str], environ: Mapping[str, str], store: Path) -> Settings:
    """Return the settings of a command in our image."""
    words, environ = as_ours(words, environ)
    parsed = parse(as_verb(words, environ))
    return load_settings(
        {"SERVING_MODEL_STORE": str(store), **environ}, command_line_of(parsed, OPTIONS)
    )


TGI = {  # words, variables of the container, address, engine's and server's options
    "docker run": (["--model-id", MODEL, "--num-shard", "2", "--max-total-tokens=64"], {},
                   "0.0.0.0:80",
                   {"tensor_parallel_degree": 2, "max_model_len": 64}),
    "model alone": (["--model-id", MODEL], {}, "0.0.0.0:80", {}),
    "command": (["text-generation-launcher", "-p", "8080"], {"MODEL_ID": MODEL},
                "0.0.0.0:8080", {}),
    "its script": (["/tgi-entrypoint.sh", "--model-id", MODEL, "--hostname", "127.0.0.1"], {},
                   "127.0.0.1:80", {}),
    "flags beside variables": (["--num-shard=1", "--dtype", "bfloat16"],
                               {"MODEL_ID": MODEL, "PORT": "81", "NUM_SHARD": "4"}, "0.0.0.0:81",
                               {"tensor_parallel_degree": 1, "dtype": "bfloat16"}),
    "the flag's model": (["--model-id", MODEL], {"HF_MODEL_ID": "acme/other"}, "0.0.0.0:80", {}),
}  # fmt: skip


@pytest.mark.parametrize(("words", "environ", "address", "options"), TGI.values(), ids=TGI)
def test_tgi_s_command_is_read_as_its_variables(
    words: list[str], environ: dict[str, str], address: str, options: dict[str, object],
    tmp_path: Path,
) -> None:  # fmt: skip
    """The port is that of TGI's image, answers have TGI's form, and the flag's model counts."""
    settings = started(words, environ, tmp_path)
    assert not settings.errors
    assert settings.server.inference_address == f"http://{address}"
    assert settings.model.model_id == MODEL
    assert settings.model.tgi_compat
    found = {name: settings.model.details[name].value for name in options}
    assert found == options


OTHERS = {
    "vllm's flags": ["--model", MODEL, "--dtype", "auto", "--port", "1"],
    "both read it": ["--trust-remote-code", "--revision", "x"],
    "a verb": ["explain", "--model-id", "x"],
    "a program": ["sh", "-c", "text-generation-launcher --model-id x"],
    "kserve's": ["--model_name=x", "--model-id=y"],
}


@pytest.mark.parametrize("words", OTHERS.values(), ids=OTHERS)
def test_other_commands_stay_as_they_are(words: list[str]) -> None:
    """Flags that vLLM has, too, are vLLM's, and so are those of which one is no program's."""
    assert as_ours(words, {"A": "b"}) == (words, {"A": "b"})


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["djl-serving", "-m", "x"], ["serve", "-m", "x"]),
        (["djl-serving"], ["serve"]),
        (["/usr/local/bin/dockerd-entrypoint.sh", "serve"], ["serve"]),
        (["/usr/local/bin/dockerd-entrypoint.sh", "serve", "-s", "y"], ["serve", "-s", "y"]),
    ],
)
def test_lmi_s_entry_point_is_serve(words: list[str], ours: list[str]) -> None:
    """The entry point of LMI's image, which a manifest may name, and its program."""
    assert as_ours(words, {}) == (ours, {})


def enter(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point as a container would."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-P", "-m", "lmi_vllm.features.image", *words]
    return subprocess.run(program, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "words",
    [
        ["--model /nowhere --api-key s3cret --port 1"],
        ["--model=/nowhere --api-key=s3cret"],
        ["serve", "--api-key s3cret"],
        ["serve", "/nowhere --api-key s3cret"],
        ["serve --api-key s3cret"],
        ["vllm serve /nowhere --api_key s3cret"],
        ["--model-id /nowhere --api-key s3cret"],
        ["text-generation-launcher", "--model-id /nowhere --api-key s3cret"],
    ],
)
def test_a_command_line_in_one_word_is_named_and_not_shown(words: list[str]) -> None:
    """`args: ["--model x --api-key y"]`: the error quoted the word, and with it the key."""
    ended = enter(*words)
    assert ended.returncode
    assert "this one word is a command line" in ended.stderr
    assert "s3cret" not in ended.stdout + ended.stderr


def test_a_flag_that_the_launcher_lacks_is_named() -> None:
    """No other server starts with half of the flags."""
    ended = enter("text-generation-launcher", "--model-id", "x", "--bogus")
    assert (ended.returncode, ended.stderr) == (
        1, "lmi-vllm: error: --bogus: TGI's launcher has no such flag\n",
    )  # fmt: skip
