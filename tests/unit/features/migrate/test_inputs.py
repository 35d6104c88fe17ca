"""`migrate`: the forms that people have variables in, and that none of them is lost."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.migrate import command as migrate
from lmi_vllm.features.migrate.environment_files import read_environment
from tests.support.assembled import CONFIGURATION

GIVEN = {"HF_MODEL_ID": "a/b", "OPTION_DTYPE": "bf16", "OPTION_X": '{"k": 1}'}
AS_JSON = json.dumps(GIVEN)
KUBERNETES = """
kind: Deployment
spec:
  containers:
  - name: lmi
    env:
    - name: HF_MODEL_ID
      value: a/b
    - {name: OPTION_DTYPE, value: bf16}
    - name: OPTION_X
      value: '{"k": 1}'
"""
FORMS = {
    "lines": "# c\nexport HF_MODEL_ID=a/b\nOPTION_DTYPE='bf16'\nOPTION_X={\"k\": 1}\n",
    "json": AS_JSON,
    "create-model": json.dumps({"PrimaryContainer": {"Image": "i", "Environment": GIVEN}}),
    "describe-model": json.dumps({"ModelName": "m", "Containers": [{"Environment": GIVEN}]}),
    "kubernetes": KUBERNETES,
    "kubernetes-list": json.dumps([{"name": key, "value": text} for key, text in GIVEN.items()]),
    "compose": "services:\n  lmi:\n    environment:\n" + "".join(
        f"      {key}: '{text}'\n" for key, text in GIVEN.items()),
    "inspect": json.dumps([{"Config": {"Env": [f"{k}={text}" for k, text in GIVEN.items()]}}]),
    "yaml": "HF_MODEL_ID: a/b\nOPTION_DTYPE: bf16\nOPTION_X: '{\"k\": 1}'\n",
    "docker-run": "docker run --gpus all -e HF_MODEL_ID=a/b --env OPTION_DTYPE=bf16 \\\n"
    "  --env=OPTION_X='{\"k\": 1}' -p 8080:8080 image\n",
    "dockerfile": "FROM x\nENV HF_MODEL_ID=a/b OPTION_DTYPE=bf16\nENV OPTION_X '{\"k\": 1}'\n",
    "python": "model = Model(image, env={'HF_MODEL_ID': 'a/b', 'OPTION_DTYPE': str('bf16'),\n"
    "  'OPTION_X': '{\"k\": 1}'})\n",
    "assignments": "env['HF_MODEL_ID'] = 'a/b'\nenv.update(OPTION_DTYPE='bf16')\n"
    "env['OPTION_X'] = json.dumps({'k': 1})\n",
    "notebook": json.dumps({"cells": [
        {"cell_type": "markdown", "source": ["env = {'NOT': 'this'}"]},
        {"cell_type": "code", "source": ["%pip install x\n", f"env = {GIVEN!r}\n"]}]}),
    "configmap": "kind: ConfigMap\nmetadata: {name: A}\ndata:\n" + "".join(
        f"  {key}: '{text}'\n" for key, text in GIVEN.items()),
    "terraform": 'resource "aws_sagemaker_model" "m" {\n  primary_container {\n    image = "i"\n'
    '    environment = {\n      HF_MODEL_ID = "a/b"\n      OPTION_DTYPE = "bf16"\n'
    '      "OPTION_X" = "{\\"k\\": 1}"\n    }\n  }\n}\n',
    "javascript": "new CreateModelCommand({ PrimaryContainer: { Image: uri, Environment: {\n"
    "  HF_MODEL_ID: 'a/b', 'OPTION_DTYPE': \"bf16\",\n  OPTION_X: '{\"k\": 1}' } } });\n",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_form_is_read(tmp_path: Path, form: str, encoding: str) -> None:
    """Each gives the same variables, with and without a byte order mark."""
    file = tmp_path / "given"
    file.write_text(FORMS[form], encoding)
    assert read_environment(str(file)) == GIVEN


def test_values_that_a_file_does_not_hold_are_named(tmp_path: Path) -> None:
    """Secrets of Kubernetes, computed values of Python, names that `docker run` hands on."""
    file = tmp_path / "given"
    for text in (
        "env:\n- name: A\n  value: x\n- name: B\n  valueFrom: {secretKeyRef: {name: s}}\n",
        "env = {'A': 'x', 'B': json.dumps(count)}\n",
        "docker run -e A=x -e B image\n",
        'environment = {\n  A = "x" # why\n  B = var.b\n}\n',
        "environment: {\n  A: 'x', // why\n  B: process.env.B,\n}\n;",
        'environment = {\n  A = "x"\n  B = "${var.b}"\n}\n',
        "Environment:\n  A: x\n  B: !Ref Model\n",
        "Environment:\n  A: x\n  B: !Sub 'a/${Model}'\n",
        "env = {}\nenv['A'] = 'x'\nenv['B'] = json.dumps({'n': count})\n",
        "env = dict(A='x', B=name)\n",
        "kind: ConfigMap\ndata: {A: x}\n---\nkind: Secret\ndata: {B: czNjcmV0}\n",
        "kind: ConfigMap\ndata: {A: x}\n---\nkind: Secret\nstringData: {B: s3cret}\n",
    ):
        file.write_text(text, "utf-8")
        assert read_environment(str(file)) == {"A": "x", "B": None}


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """The message names the file."""
    (tmp_path / "given").write_bytes(b"A=\xff\xfe")
    for name in ("given", "missing"):
        with pytest.raises(ConfigurationError, match=name):
            read_environment(str(tmp_path / name))


def run(capsys: pytest.CaptureFixture[str], *words: str, **environ: str) -> tuple[int, Any]:
    """Run `migrate --format json`; return its code and document, None without one."""
    parser = argparse.ArgumentParser()
    migrate.add_arguments(parser, CONFIGURATION)
    code = migrate.run(parser.parse_args(["--format", "json", *words]), environ, CONFIGURATION)
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


@pytest.mark.parametrize("text", ["", '{"A": ', "just words\n", "{}"])
def test_nothing_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """Exit code 2, no traceback, and nothing on stdout; so it is without any configuration."""
    file = tmp_path / "given"
    file.write_text(text, "utf-8")
    assert run(capsys, "--environment", str(file)) == (2, None)
    assert run(capsys, PATH="/bin", HOME="/root") == (2, None)


KEPT = {
    "SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_MULTI_MODEL": "false", "DJL_OFFLINE": "true",
    "HF_HUB_OFFLINE": "1", "LMI_MAX_SEQUENCES": "3", "VLLM_USE_V1": "1",
    "SAGEMAKER_BIND_TO_PORT": "9000", "FOO": "bar",
}  # fmt: skip


def test_no_variable_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole variables are kept by name; a secret is named; an overridden option is reported."""
    file, properties = tmp_path / "given.json", tmp_path / "serving.properties"
    properties.write_text("option.model_id=a/b\noption.dtype=bf16\n", "utf-8")
    given = {**KEPT, "OPTION_DTYPE": "fp16", "HF_TOKEN": "s3cret", "OWN_SECRET": "s3cret"}
    file.write_text(json.dumps(given), "utf-8")
    words = ("--environment", str(file), "--properties", str(properties))
    code, document = run(capsys, *words)
    assert (code, document["refused"]) == (0, [])
    assert document["environment"] == KEPT
    steps = [*document["mapped"], *document["approximated"]]
    sources = " ".join(step["source"] for step in steps)
    assert all(f"{name}=" in sources for name in (*KEPT, "OPTION_DTYPE", "OWN_SECRET"))
    assert "s3cret" not in json.dumps(document)


def test_own_environment_keeps_what_is_meant_for_the_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a file most variables of the process mean nothing."""
    code, document = run(
        capsys, HF_MODEL_ID="a/b", DJL_OFFLINE="true", PATH="/bin", CUDA_HOME="/usr"
    )
    assert (code, document["environment"]) == (0, {"DJL_OFFLINE": "true"})


def test_changed_defaults_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """As `explain` does, for what is not set."""
    _, document = run(capsys, HF_MODEL_ID="a/b", OPTION_ENABLE_PREFIX_CACHING="false")
    named = {step["becomes"].partition("=")[0] for step in document["changed defaults"]}
    assert "gpu_memory_utilization" in named
    assert "enable_prefix_caching" not in named


LAUNCHERS = (
    ("--from", "tgi", "--", "--model-id", "a/b", "--num-shard", "2", "--trust-remote-code"),
    ("--", "text-generation-launcher", "--model-id=a/b", "--num-shard=2", "--trust-remote-code"),
)


@pytest.mark.parametrize("words", LAUNCHERS, ids=["from", "launcher"])
def test_flags_of_tgis_launcher_are_read(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """They are TGI's variables in another spelling, and win over them."""
    code, document = run(capsys, *words, MODEL_ID="other")
    assert (code, document["from"]) == (0, "tgi")
    expected = {
        "option.model_id": "a/b",
        "option.tensor_parallel_degree": "2",
        "option.trust_remote_code": "true",
    }
    assert expected.items() <= document["properties"].items()
    code, document = run(capsys, *words, "--bogus", "1")
    assert (code, document["refused"][0]["source"]) == (2, "--bogus")


VLLM_S = {"option.model_id": "acme/x", "option.max_model_len": "64"}
TGI_S = {"option.model_id": "acme/x", "option.tensor_parallel_degree": "2"}
SCRIPT = "set -e; exec vllm serve acme/x --max-model-len $(LENGTH) && echo over"
COMMANDS = {
    "docker run --rm -it --gpus all -e HF_TOKEN=hf_x -p 80:80 --shm-size=1g vllm/vllm-openai \\\n"
    "  --model acme/x --max-model-len 64\n": VLLM_S,
    "docker run text-generation-inference:3 --model-id acme/x --num-shard 2\n": TGI_S,
    "services:\n  s:\n    environment: {A: b}\n    command: --model acme/x --max-model-len 64\n":
        VLLM_S,
    "FROM x\nENV HF_TOKEN=hf_x\nCMD vllm serve acme/x --max-model-len 64\n": VLLM_S,
    'FROM x\nENTRYPOINT ["vllm", "serve"]\nCMD ["acme/x", "--max-model-len", "64"]\n': VLLM_S,
    "env: [{name: A, value: b}]\ncommand: [vllm, serve]\nargs: [acme/x, --max-model-len=64]\n":
        VLLM_S,
    f'env: [{{name: LENGTH, value: "64"}}]\ncommand: [/bin/sh, -c]\nargs: ["{SCRIPT}"]\n': VLLM_S,
    "containers:\n- command: [python3, -m, vllm.entrypoints.openai.api_server]\n"
    "  args: [--model, acme/x, --max-model-len, '64']\n- command: [sidecar, --port, '1']\n": VLLM_S,
    "args: [/models/x, --max-model-len, '64']\n":
        {"option.model_id": "/models/x", "option.max_model_len": "64"},
    "command: [text-generation-launcher]\nargs: [--model-id, acme/x, --num-shard, '2']\n": TGI_S,
    "services:\n  s:\n    command: --model ${MODEL:-acme/x} --max-model-len ${LENGTH-64}\n": VLLM_S,
    "#!/bin/sh\nexport CUDA_VISIBLE_DEVICES=0\nnohup vllm serve acme/x \\\n  --max-model-len 64 "
    "> log 2>&1 &\n": VLLM_S,
    "python3 -m vllm.entrypoints.openai.api_server --model acme/x --max-model-len 64 | tee x\n":
        VLLM_S,
    "text-generation-launcher --model-id acme/x --num-shard 2 2>log\n": TGI_S,
    "[Service]\nEnvironment=HF_HOME=/x\nExecStart=-/opt/bin/vllm serve acme/x --max-model-len 64\n":
        VLLM_S,
    "kind: InferenceService\nspec: {predictor: {model: {modelFormat: {name: huggingface}, args: "
    "[--model_name=x, --model_id=acme/x, --backend, vllm, --max_length=64, --dtype=bfloat16]}}}\n":
        {**VLLM_S, "option.served_model_name": "x", "option.dtype": "bfloat16"},
    "command: [python, -m, huggingfaceserver]\n"
    "args: [--model_name, x, --model_dir=/mnt/models, --max_length, '64']\n":
        {**VLLM_S, "option.model_id": "/mnt/models", "option.served_model_name": "x"},
}  # fmt: skip


@pytest.mark.parametrize("text", COMMANDS)
def test_arguments_of_a_command_are_read(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result without them would be another server; other containers' mean nothing."""
    file = tmp_path / "file.yaml"
    file.write_text(text)
    code, document = run(capsys, str(file))
    assert (code, document["refused"]) == (0, [])
    assert COMMANDS[text].items() <= document["properties"].items()


SCRIPTS = {
    "CUDA_VISIBLE_DEVICES=0 exec vllm serve acme/x\n": {"CUDA_VISIBLE_DEVICES": "0"},
    "export HF_HOME=/x VLLM_PORT=1\nvllm serve acme/x\n": {"HF_HOME": "/x", "VLLM_PORT": "1"},
    '[Service]\nEnvironment=HF_HOME=/x VLLM_PORT=1\nEnvironment="RAY_X=a b"\nRestart=always\n'
    "ExecStart=/bin/vllm serve acme/x\n": {"HF_HOME": "/x", "VLLM_PORT": "1", "RAY_X": "a b"},
    "ARGS=(--port 1)\nHF_HOME=/x\nvllm serve acme/x\n": {"ARGS": None, "HF_HOME": "/x"},
    "config = LLMConfig(\n    engine_kwargs=dict(tensor_parallel_size=2),\n)\n": {},
}


@pytest.mark.parametrize("text", SCRIPTS)
def test_variables_of_scripts_are_those_of_the_shell(text: str, tmp_path: Path) -> None:
    """A command behind a variable was its value, and a second line of a unit hid the first.

    Statements of Python are no variables.
    """
    file = tmp_path / "file"
    file.write_text(text)
    assert read_environment(str(file)) == SCRIPTS[text]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- args: [--model, a/b, --bogus, x]\n- args: [--model, c/d]\n", "--model a/b --bogus x"),
        ("env: [{name: A, valueFrom: {}}]\nargs: [--model, $(A)]\n", "$(A)"),
        ("{{ if .Values.x }}\nargs: [--model, acme/x, --max-model-len, 8]\n", "--max-model-len"),
        ("args: [--model, a/b, --swap-space, '4']\n", "--swap-space"),
    ],
)
def test_arguments_that_cannot_be_read_are_named(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several servers, of values that the file does not hold, of templates, of no release."""
    file = tmp_path / "file"
    file.write_text(text)
    code, document = run(capsys, "--environment", str(file))
    assert code == 2
    assert any(named in step["source"] for step in document["refused"]), document["refused"]


def test_variables_of_other_servers_are_kept_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option of ours beside TGI's variables made them unknown; NIM's always were."""
    file = tmp_path / "given"
    file.write_text(
        "HF_MODEL_ID=a/b\nOPTION_DTYPE=bf16\nMAX_TOTAL_TOKENS=64\nCUDA_GRAPHS=1\n"
        "NIM_MAX_MODEL_LEN=64\nFOO=bar\n"
    )
    _, document = run(capsys, "--environment", str(file))
    why = {step["source"].partition("=")[0]: step["why"] for step in document["approximated"]}
    assert "migrate --from tgi" in why["MAX_TOTAL_TOKENS"]
    assert "migrate --from tgi" in why["CUDA_GRAPHS"]
    assert "OPTION_MAX_MODEL_LEN" in why["NIM_MAX_MODEL_LEN"]
    assert why["FOO"] == "kept; this server does not read it"


def test_wrong_source_names_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """As they are written; Python's names of them stood there."""
    parser = argparse.ArgumentParser()
    migrate.add_arguments(parser, CONFIGURATION)
    with pytest.raises(SystemExit):
        parser.parse_args(["--from", "nim"])
    said = capsys.readouterr().err
    assert "'tgi'" in said
    assert "SourceServer" not in said


def test_a_block_of_yaml_ends_with_no_line_break(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A boolean with one was refused."""
    file = tmp_path / "map.yaml"
    file.write_text("kind: ConfigMap\ndata:\n  OPTION_ENFORCE_EAGER: |\n    true\n")
    code, document = run(capsys, str(file))
    assert (code, document["properties"]) == (0, {"option.enforce_eager": "true"})


def test_no_default_stands_beside_a_refused_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file would start with it: one GPU, where the command had some that is not in the file."""
    file = tmp_path / "run.sh"
    file.write_text("vllm serve acme/x --tensor-parallel-size $GPUS\n")
    _, document = run(capsys, str(file))
    assert "--tensor-parallel-size" in str(document["refused"])
    assert "option.tensor_parallel_size" not in document["properties"]
    assert document["properties"]["option.data_parallel_size"] == "1"
