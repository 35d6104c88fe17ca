"""Where a setting was written is read as an attribute: never by a string, never by a wrong name."""

import ast
import copy
import os
import pickle
from pathlib import Path

import pytest

import lmi_vllm
from lmi_vllm.config.setting import Details, Sentence
from lmi_vllm.config.settings import ModelSettings
from lmi_vllm.messages import OriginKind
from tests.support.assembled import load_settings

# The core alone is tested as a folder of links.
FILES = [
    Path(folder, name)
    for folder, _, names in os.walk(Path(lmi_vllm.__file__).parent, followlinks=True)
    for name in names
    if name.endswith(".py")
]


def test_a_name_that_is_no_option_is_an_error() -> None:
    """At runtime, too: what a type checker does not see is not taken for an unset option."""
    with pytest.raises(AttributeError, match="quantise is no option"):
        _ = load_settings({}).model.details.quantise
    with pytest.raises(AttributeError):
        _ = ModelSettings().details.max_lora_ranks


def test_no_setting_is_read_by_a_string() -> None:
    """Neither its value nor its place."""
    found = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".details"):
                found.append(f"{file}:{node.lineno}")
    assert found == []


def test_a_setting_that_is_written_nowhere_says_so() -> None:
    """Its place is the default; with a default of the table it has that value."""
    details = load_settings({"OPTION_QUANTIZE": "fp8"}).model.details
    assert (details.quantize.value, details.quantize.origin.kind) == ("fp8", OriginKind.VARIABLE)
    assert (details.max_lora_rank.is_set, details.max_lora_rank.value) == (False, None)
    assert (details.max_loras.is_set, details.max_loras.value) == (False, 4)
    assert details.entry_point.name == "entryPoint"
    assert "max_lora_rank" not in details


def test_private_names_are_no_settings() -> None:
    """Copies and pickles ask for some: a process of a server gets its settings so."""
    details = Details[ModelSettings]({}, ModelSettings.rows)
    with pytest.raises(AttributeError):
        _ = details._nothing
    assert dict(copy.copy(details)) == {}


def test_a_sentence_keeps_what_it_is_about() -> None:
    """In another process, too."""
    setting = load_settings({"OPTION_QUANTIZE": "fp8"}).model.details.quantize
    sentence = Sentence.of("text", setting)
    again = pickle.loads(pickle.dumps(sentence))
    assert (again, again.about) == ("text", sentence.about)
