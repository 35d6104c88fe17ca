"""What `serve run lmi_vllm.ray:app` is given: variables of the server, and two words of ours."""

from typing import Any

import pytest

from lmi_vllm.features.ray_serve.arguments import ReplicaArguments, read_arguments


def test_variables_are_text_as_in_an_environment() -> None:
    """YAML has numbers, flags and objects; a shell has quotes."""
    given = {
        "command": "--demo --served-model-name 'a b'", "gpus": "2", "HF_MODEL_ID": "acme/x",
        "OPTION_MAX_MODEL_LEN": 8192, "OPTION_ENABLE_LORA": True,
        "OPTION_KV_TRANSFER_CONFIG": {"kv_role": "kv_both"},
    }  # fmt: skip
    variables = {
        "HF_MODEL_ID": "acme/x", "OPTION_MAX_MODEL_LEN": "8192", "OPTION_ENABLE_LORA": "true",
        "OPTION_KV_TRANSFER_CONFIG": '{"kv_role": "kv_both"}',
    }  # fmt: skip
    words = ["--demo", "--served-model-name", "a b"]
    assert read_arguments(given) == ReplicaArguments(words, variables, 2)
    assert read_arguments({}) == ReplicaArguments([], {}, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "x"}, "argument model .*: expected command, gpus or a variable"),
        ({"gpus": "two"}, "argument gpus .*: expected a number from 0 on, not 'two'"),
        ({"gpus": -1}, "argument gpus"),
        ({"command": "--a 'b"}, "argument command .*: No closing quotation"),
        ({"command": ["--demo"]}, "argument command .*: expected text"),
    ],
)
def test_other_arguments_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    """And say what is allowed."""
    with pytest.raises(ValueError, match=said):
        read_arguments(given)
