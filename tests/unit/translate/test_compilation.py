"""On a CPU without a compiler vLLM would end in an InductorError, a minute after its import."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_vllm.messages import OriginKind
from lmi_vllm.translate.devices import Devices, detect_devices, missing_compiler
from tests.support.assembled import load_settings, translate_start

LACK = "a C++ compiler (g++; apt-get install g++)"
BARE = Devices(missing_compiler=LACK)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder, as far as its architecture."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def environ_of(model: Path, **options: str) -> dict[str, str]:
    """The variables of a start with the model."""
    return {"HF_MODEL_ID": str(model), **{f"OPTION_{name}": text for name, text in options.items()}}


def test_model_is_not_compiled_without_a_compiler(model: Path) -> None:
    """One warning names what is missing, the way, and the price; with it nothing is said."""
    environ = environ_of(model)
    found = translate_start(load_settings(environ), environ, BARE)
    assert found.arguments.values["enforce_eager"] is True
    assert found.arguments.origin_of("enforce_eager").kind is OriginKind.DERIVED
    (said,) = [warning for warning in found.warnings if LACK in warning]
    assert "enforce_eager=true is used; the start is shorter, each token takes longer" in said
    for devices in (replace(BARE, gpu_count=1), Devices()):
        found = translate_start(load_settings(environ), environ, devices)
        assert "enforce_eager" not in found.arguments.values
        assert not [warning for warning in found.warnings if LACK in warning]


def test_what_was_asked_for_stays(model: Path) -> None:
    """Eager mode without a message, and a compilation of one's own; false is refused."""
    for options in ({"ENFORCE_EAGER": "true"}, {"COMPILATION_CONFIG": '{"mode": 0}'}):
        environ = environ_of(model, **options)
        found = translate_start(load_settings(environ), environ, BARE)
        assert not [said for said in (*found.warnings, *found.errors) if LACK in said]
    environ = environ_of(model, ENFORCE_EAGER="false")
    (error,) = translate_start(load_settings(environ), environ, BARE).errors
    assert error.startswith(
        "enforce_eager (OPTION_ENFORCE_EAGER) is false and needs a C++ compiler"
    )


def test_engine_that_compiles_nothing_needs_no_compiler(model: Path) -> None:
    """T5's own engine."""
    (model / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    environ = environ_of(model)
    found = translate_start(load_settings(environ), environ, BARE)
    assert not [said for said in found.warnings if "compiler" in said]


def test_compiler_is_looked_for_as_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In PATH, or as CXX names it; and the headers of this Python."""
    compiler = tmp_path / "my-c++"
    assert missing_compiler({"PATH": str(tmp_path)}) == LACK
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    named = {"PATH": str(tmp_path), "CXX": "my-c++ -pipe"}
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert missing_compiler(named) == "Python.h (apt-get install python3-dev)"
    assert detect_devices(named).missing_compiler
    (tmp_path / "Python.h").touch()
    assert missing_compiler(named) == ""
