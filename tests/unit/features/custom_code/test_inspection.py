"""Faults of a model.py that its text shows, without running it."""

import argparse
import importlib
from pathlib import Path

import pytest

from lmi_vllm.cli import VERBS
from lmi_vllm.commands import explain
from lmi_vllm.features.custom_code.loading import CodeError, inspect_code
from tests.support.assembled import CONFIGURATION
from tests.support.hook_files import FORMATTERS, PROMPTS, write_code

FAULTS = {
    "missing-module": ("import json\nfrom nowhere import x\n", 2, "No module named 'nowhere'"),
    "wrapped-handler": (
        "from djl_python import huggingface\n", 1, "No module named 'djl_python.huggingface'"),
    "wrapped-service": (
        "from djl_python.tensorrt_llm import TRTLLMService\n", 1, "@output_formatter"),
    "unknown-module": ("import djl_python.arg_parser\n", 1, "djl_python has async_utils"),
    "unknown-name": (
        "from djl_python.outputs import Outputs\n", 1, "cannot import name 'Outputs'"),
    "input-signature": (
        "from djl_python.input_parser import input_formatter\n"
        "@input_formatter\ndef f(payload, engine): ...\n", 3, "engine"),
    "output-signature": (
        "from djl_python import output_formatter as of\n"
        "@of.output_formatter\ndef f(a, b, c): ...\n", 3, "['b', 'c']"),
    "named-signature": ("def rows(): ...\n", 1, "rows takes no argument"),
    "predict_fn": ("def predict_fn(input_data, model): ...\n", 1, "predict_fn would never"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_fault_names_file_and_line(tmp_path: Path, case: str) -> None:
    """What would fail at the load, or at each request, is found before the engine."""
    text, line, reason = FAULTS[case]
    path = write_code(tmp_path, text)
    with pytest.raises(CodeError) as caught:
        inspect_code(path, "handle", "rows")
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert reason in str(caught.value)


FINE = {
    "lazy-import": "def handle(inputs):\n    import nowhere\n",
    "tried-import": "try:\n    import nowhere\nexcept ImportError:\n    nowhere = None\n",
    "library": "import asyncio, orjson\nfrom transformers import AutoTokenizer\n",
    "api": (
        "from djl_python import Input, Output, PairList, SessionManager, __version__\n"
        "from djl_python.request import Request\nfrom djl_python.np_util import to_nd_list\n"
        "from djl_python.encode_decode import decode, decode_csv\n"
        "from djl_python.input_parser import parse_adapters\n"
        "from djl_python.streaming_utils import StreamingUtils\n"
    ),
    "older-output": "def rows(token, first, last, details, text, id): ...\n",
    "annotated": "def rows(out: 'request_io.RequestOutput'): ...\n",
    "predict_fn": "def predict_fn(input_data, model): ...\nasync def handle(inputs): ...\n",
}


@pytest.mark.parametrize("case", FINE)
def test_working_file_has_no_fault(tmp_path: Path, case: str) -> None:
    """Imports that may be left out at run time are not judged."""
    assert inspect_code(write_code(tmp_path, FINE[case]), "handle", "rows") == ()


def test_files_beside_are_read_too(tmp_path: Path) -> None:
    """The fault of a helper is that of the file that imports it; the place is the helper's."""
    path = write_code(tmp_path, FORMATTERS)
    helper = write_code(tmp_path, PROMPTS, "prompts.py")
    assert inspect_code(path, "handle", None) == ()
    helper.write_text("import nowhere\n", "utf-8")
    with pytest.raises(CodeError, match=r"prompts\.py, line 1: No module named 'nowhere'"):
        inspect_code(path, "handle", None)


def test_missing_module_may_come_with_the_packages(tmp_path: Path) -> None:
    """A requirements.txt that is not installed yet may bring it."""
    path = write_code(tmp_path, "import nowhere\n")
    assert inspect_code(path, "handle", None, has_packages=True) == ()


ADAPTERS = "def register_adapter(inputs): ...\ndef update_adapter(inputs): ...\n"


def test_functions_that_are_never_called_are_named(tmp_path: Path) -> None:
    """With a handler of its own `register_adapter` is called; `update_adapter` never is."""
    path = write_code(tmp_path, ADAPTERS)
    first, second = inspect_code(path, "handle", None)
    assert first.startswith(f"{path}, line 1: register_adapter is never called: ")
    assert second.startswith(f"{path}, line 2: update_adapter is never called: ")
    path.write_text(ADAPTERS + "def handle(inputs): ...\n", "utf-8")
    (only,) = inspect_code(path, "handle", None)
    assert "update_adapter is never called" in only


@pytest.mark.parametrize("verb", ["explain", "validate"])
def test_fault_is_an_error_of_explain_and_validate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """Exit code 2 with file and line; LMI_CUSTOM_CODE=none leaves the file unread."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', "utf-8")
    write_code(tmp_path, "from djl_python.huggingface import HuggingFaceService\n")
    cases: tuple[tuple[dict[str, str], int], ...] = (({}, 2), ({"LMI_CUSTOM_CODE": "none"}, 0))
    command = importlib.import_module(VERBS[verb].module)
    for environ, code in cases:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser, CONFIGURATION)
        arguments = parser.parse_args(["--model-store", str(tmp_path), "--offline"])
        assert command.run(arguments, environ, CONFIGURATION) == code
        said = capsys.readouterr().out
        assert ("line 1: No module named 'djl_python.huggingface'" in said) is (code == 2)


def test_sagemakers_folder_of_code_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LMI does not read `code/` either; a warning says where the files belong."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', "utf-8")
    write_code(tmp_path / "code", "x = 1\n", "inference.py")
    write_code(tmp_path / "code", "peft\n", "requirements.txt")
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser, CONFIGURATION)
    arguments = parser.parse_args(["--model-store", str(tmp_path), "--offline"])
    assert explain.run(arguments, {}, CONFIGURATION) == 0
    said = capsys.readouterr().out
    assert f"inference.py, requirements.txt in {tmp_path}/code is not read" in said
