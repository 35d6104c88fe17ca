"""Loading the model's own file: what counts in it, and every way in which it can be wrong."""

import os
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from lmi_vllm.features.custom_code.djl_python.request_io import TextInput
from lmi_vllm.features.custom_code.functions import HookContext, new_payload
from lmi_vllm.features.custom_code.loading import CodeError, inspect_code, load_model_code
from tests.support.hook_files import FORMATTERS, PROMPTS, write_code


def test_loading_finds_decorated_functions_and_files_beside(tmp_path: Path) -> None:
    """Both hooks are found, the helper is imported, the folder is the working directory."""
    write_code(tmp_path, PROMPTS, "prompts.py")
    hooks = load_model_code(write_code(tmp_path, FORMATTERS), "handle", None)
    assert hooks.handle is None
    assert hooks.input is not None
    assert hooks.output is not None
    made = hooks.input.call(HookContext({"ask": "Hello", "stream": True}))
    assert made == {"inputs": "Hello", "parameters": {"max_new_tokens": 5}, "stream": True}
    assert os.getcwd() == str(tmp_path)  # noqa: PTH109 (the string is what user code sees)


def test_loading_writes_nothing_beside_the_file(tmp_path: Path) -> None:
    """A model folder may be a read-only mount: no bytecode appears in it."""
    sys.dont_write_bytecode = False  # whatever the shell has set
    write_code(tmp_path, PROMPTS, "prompts.py")
    load_model_code(write_code(tmp_path, FORMATTERS), "handle", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.py", "prompts.py"]


def test_loading_takes_the_handler_by_its_configured_name(tmp_path: Path) -> None:
    """`option.handler` names the function."""
    path = write_code(tmp_path, "async def answer(inputs): ...\n", "serve.py")
    assert load_model_code(path, "answer", None).handle is not None
    assert load_model_code(path, "handle", None).handle is None


def test_loading_takes_a_named_output_formatter(tmp_path: Path) -> None:
    """`option.output_formatter` may name an undecorated function; it wins over a decorated one."""
    path = write_code(
        tmp_path,
        """
        from djl_python.output_formatter import output_formatter
        @output_formatter
        def decorated(output): ...
        def named(output): ...
        """,
    )
    for name, expected in ((None, "decorated"), ("named", "named"), ("missing", "decorated")):
        output = load_model_code(path, "handle", name).output
        assert output is not None
        assert output.function.__name__ == expected


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("def f(:\n", 1, "SyntaxError"),
        ("import json\nfrom nowhere import Thing\n", 2, "No module named 'nowhere'"),
        ("import djl_python.rolling_batch\n", 1, "djl_python.rolling_batch"),
        ("x = 1\n\nraise RuntimeError('no weights here')\n", 3, "no weights here"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit"),
    ],
    ids=["syntax", "import", "shim", "raises", "exits"],
)
def test_loading_failure_names_file_line_and_reason(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    """The message says where to look; nothing half-loaded stays."""
    path = write_code(tmp_path, text)
    with pytest.raises(CodeError) as caught:
        load_model_code(path, "handle", None)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert reason in str(caught.value)
    assert "model" not in sys.modules


def test_inspection_runs_nothing(tmp_path: Path) -> None:
    """The early check only parses."""
    assert inspect_code(write_code(tmp_path, "raise SystemExit\n"), "handle", None) == ()
    with pytest.raises(CodeError, match="line 1"):
        inspect_code(write_code(tmp_path, "class :\n"), "handle", None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("@input_formatter\ndef f(): ...", "f takes no argument"),
        ("@input_formatter\ndef f(payload, engine): ...", "engine"),
        ("@output_formatter\ndef f(a, b, c): ...", "['b', 'c']"),
    ],
    ids=["no-argument", "unknown-argument", "three-arguments"],
)
def test_loading_refuses_functions_that_cannot_be_called(
    tmp_path: Path, text: str, named: str
) -> None:
    """What would fail on every request fails at the start."""
    imports = (
        "from djl_python.input_parser import input_formatter\n"
        "from djl_python.output_formatter import output_formatter\n"
    )
    path = write_code(tmp_path, imports + text)
    with pytest.raises(CodeError) as caught:
        load_model_code(path, "handle", None)
    assert named in str(caught.value)


SAGEMAKER = """
    def input_fn(request_body, content_type):
        return {"inputs": request_body.decode() + content_type}
    def output_fn(prediction, accept): return [prediction, accept]
    def model_fn(model_dir): ...
"""
PREDICT = "def predict_fn(input_data, model): ...\n"


def test_loading_takes_sagemaker_functions_by_their_exact_signature(tmp_path: Path) -> None:
    """They count without a decorated function only, and only with the documented parameters."""
    hooks = load_model_code(write_code(tmp_path, SAGEMAKER), "handle", None)
    assert hooks.input is not None
    assert hooks.output is not None
    told = HookContext({}, body=b"x", content_type="text/x", accept="a/b")
    assert hooks.input.call(told) == {"inputs": "xtext/x"}
    assert hooks.output.call("y", told) == ["y", "a/b"]
    other = write_code(tmp_path, "def input_fn(body, kind): ...\n", "other.py")
    assert not load_model_code(other, "handle", None)


def test_unused_sagemaker_function_is_refused_at_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """predict_fn ends the start, unless the file answers itself; model_fn is warned of."""
    with pytest.raises(CodeError, match=r"predict_fn would never be called.*handle\(inputs\)"):
        load_model_code(write_code(tmp_path, PREDICT + dedent(SAGEMAKER)), "handle", None)
    handle = "async def handle(inputs): return None\n"
    assert load_model_code(write_code(tmp_path, handle + PREDICT), "handle", None).handle
    own = write_code(tmp_path, "def predict_fn(tokens): ...\n")
    assert not load_model_code(own, "handle", None)
    load_model_code(write_code(tmp_path, SAGEMAKER), "handle", None)
    assert "model_fn has no effect" in caplog.text


def test_shim_names_a_real_package_that_it_hides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A djl_python that is installed is not shadowed silently."""
    write_code(tmp_path / "djl_python", "real = True\n", "__init__.py")
    sys.path.insert(0, str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "djl_python"]:
        del sys.modules[name]
    load_model_code(write_code(tmp_path / "m", "from djl_python import Output\n"), "handle", None)
    assert str(tmp_path / "djl_python") in caplog.text


def test_older_text_input_is_a_payload() -> None:
    """Hooks of LMI's older API return one instead of a dict."""
    older = TextInput(input_text="x", parameters={"n": 1})
    assert new_payload(older) == {"inputs": "x", "parameters": {"n": 1}}
