"""Property tests: no text of any option, variable or file crashes the reading of configuration."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_vllm.config.options import ALIAS_VARIABLES
from lmi_vllm.config.properties import parse_properties
from lmi_vllm.translate.devices import Devices
from lmi_vllm.translate.explain import FORMATS
from tests.support.assembled import OPTIONS, explain, load_settings, translate_start

KNOWN_NASTY = (
    "", " ", "None", "true", "TRUE", "max", "auto", "-1", "0", "4.0", "1e400", "nan", "16K",
    "1.5K", "{}", "[]", "[[]]", '{"a":', "null", '{"a": {"b": [1]}}', "\x00", "٣", "9" * 400,
    "s3://b/p", "a,b", "image=4", "=", "[" * 500, "http://[", "-" * 50, "²", "load_models",
    "//[",
)  # fmt: skip
NASTY = st.one_of(st.text(max_size=40), st.sampled_from(KNOWN_NASTY))
NO_STORE = {"SERVING_MODEL_STORE": "/nonexistent"}


def read(environ: dict[str, str], gpus: int = 4) -> None:
    """Read and explain `environ` in every format."""
    explanation = explain(translate_start(load_settings(environ), environ, Devices(gpus)))
    json.loads(FORMATS["json"](explanation))
    assert all(form(explanation) for form in FORMATS.values())


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(OPTIONS.names()), text=NASTY)
def test_no_text_of_an_option_crashes(name: str, text: str) -> None:
    """Every option, the table's and vLLM's, from a variable."""
    read(NO_STORE | {f"OPTION_{name}": text})


@pytest.mark.parametrize(
    "text", ["", "true", "-1", "16K", '{"a": [1]}'], ids=lambda text: text or "-"
)
def test_no_option_crashes_on(text: str) -> None:
    """The same text under every single name."""
    for name in OPTIONS.names():
        load_settings(NO_STORE | {f"OPTION_{name}": text})


NAMES = [
    *(f"SERVING_{row.name.upper()}" for row in OPTIONS.serving_rows()),
    *(row.name for row in OPTIONS.rows.variables),
    *(row.source for row in ALIAS_VARIABLES),
    "TENSOR_PARALLEL_DEGREE", "PIPELINE_PARALLEL_DEGREE", "HF_MODEL_ID", "HF_REVISION", "HF_TASK",
    "SAGEMAKER_NUM_MODEL_WORKERS", "SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_MAX_REQUEST_SIZE",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(NAMES), text=NASTY)
def test_no_text_of_a_variable_crashes(name: str, text: str) -> None:
    """Every server setting and every variable."""
    read(NO_STORE | {name: text}, gpus=0)


@pytest.mark.parametrize(("place", "name"), list(enumerate(NAMES)))
def test_no_variable_crashes_on_a_known_nasty_text(place: int, name: str) -> None:
    """Every variable with a third of the texts that have broken a parser before, in turn."""
    for text in KNOWN_NASTY[place % 3 :: 3]:
        read(NO_STORE | {name: text}, gpus=0)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [f"option.{row.name}" for row in OPTIONS.rows.options] + ["engine", "maxWorkers"]
        ),
        NASTY,
        max_size=8,
    ),
    st.integers(0, 8),
)
def test_no_combination_crashes(pairs: dict[str, str], gpus: int) -> None:
    """Several options at once, whatever they say."""
    text = "\n".join(f"{key}={value}" for key, value in pairs.items())
    environ = NO_STORE | {"HF_MODEL_ID": "s3://b/p"}
    found = load_settings(environ, extra_properties=parse_properties(text))
    explanation = explain(translate_start(found, environ, Devices(gpus)))
    assert set(explanation.engine_args) >= {"tensor_parallel_size", "max_num_seqs"}
