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


def test_command_may_be_a_list_of_words() -> None:
    """As YAML has them: a word with a blank is one word, and a number is text."""
    given = {"command": ["--served-model-name", "a b", "--max-model-len", 512]}
    assert read_arguments(given).words == ["--served-model-name", "a b", "--max-model-len", "512"]


@pytest.mark.parametrize("given", [0, "0.5", 0.25, 2, "2", 2.0])
def test_gpus_are_what_ray_gives(given: Any) -> None:
    """Whole ones, or a part of one that replicas share."""
    assert read_arguments({"gpus": given}).gpus == float(given)


def test_replica_without_gpus_sees_none() -> None:
    """Unless it is told which, as on a cluster that counts none."""
    name = "CUDA_VISIBLE_DEVICES"
    assert read_arguments({"gpus": 0}).variables == {name: ""}
    assert read_arguments({"gpus": 0, name: "1"}).variables == {name: "1"}
    assert read_arguments({"gpus": 0.5}).variables == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "x"}, "argument model .*: expected command, gpus or a variable"),
        ({"gpus": "two"}, "argument gpus .*: expected a whole number .* not 'two'"),
        *(({"gpus": gpus}, "argument gpus") for gpus in (-1, 1.5, "nan", "inf", -0.5, True, None)),
        ({"command": "--a 'b"}, "argument command .*: No closing quotation"),
        ({"command": 5}, "argument command .*: expected text or a list"),
    ],
)
def test_other_arguments_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    """And say what is allowed."""
    with pytest.raises(ValueError, match=said):
        read_arguments(given)
