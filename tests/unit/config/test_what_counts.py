"""Which of two values counts is said, and what is shown is no secret."""

from pathlib import Path

import pytest

from lmi_vllm.config.secrets import is_secret
from tests.unit.conftest import ExplainRun


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [
        ("private_key_file", False),
        ("LMI_API_KEY_FILE", False),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", False),
        ("private_key", True),
        ("LMI_API_KEY", True),
        ("file_password", True),
    ],
)
def test_path_of_a_file_is_no_secret(name: str, *, is_hidden: bool) -> None:
    """What is in the file is."""
    assert is_secret(name) == is_hidden


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["-dp", "2"], "data_parallel_size"),
        (["-pp", "2"], "pipeline_parallel"),
        (["-dp", "2", "-pp", "2"], "pipeline_parallel"),
        (["-tp", "2"], "tensor_parallel"),
    ],
)
def test_too_many_ranks_name_what_asks_for_them(
    flags: list[str], named: str, explained: ExplainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU `-dp 2` was refused as the pipeline's degree."""
    monkeypatch.setattr("lmi_vllm.translate.devices._cpu_rank_limit", lambda _: 1)
    names = {"-dp": "DATA_PARALLEL_SIZE", "-pp": "PIPELINE_PARALLEL_DEGREE",
             "-tp": "TENSOR_PARALLEL_DEGREE"}  # fmt: skip
    pairs = zip(flags[::2], flags[1::2], strict=True)
    environ = {f"OPTION_{names[flag]}": value for flag, value in pairs}
    errors = explained("", environ, "--gpus", "0").errors
    (error,) = (text for text in errors if "devices and there is no GPU" in text)
    assert named in error.partition(" asks for")[0]


def test_two_variables_that_disagree_are_a_warning(explained: ExplainRun, tmp_path: Path) -> None:
    """One was hidden with a note in a table alone."""
    (tmp_path / "model").mkdir()
    given = {"MODEL_ID": str(tmp_path / "model"), "NUM_SHARD": "1", "ENABLE_CUDA_GRAPHS": "false"}
    for sizes in ("0", "1,2"):
        found = explained("", {**given, "CUDA_GRAPHS": sizes}).document
        assert any("ENABLE_CUDA_GRAPHS=false has no effect" in text for text in found["warnings"])
        assert found["engine_args"].get("enforce_eager", False) is (sizes == "0")
    pairs = {
        "SM_VLLM_TENSOR_PARALLEL_SIZE=2": "TENSOR_PARALLEL_DEGREE=1",
        "OPTION_MAX_ROLLING_BATCH_SIZE=32": "MAX_BATCH_SIZE=16",
    }
    for first, other in pairs.items():
        environ = dict(pair.split("=") for pair in (first, other))
        said = explained("", environ, "--gpus", "2").document["warnings"]
        names = (other.partition("=")[0], first.partition("=")[0])
        wanted = f"({names[0]}) is not used: "
        assert any(wanted in text and f"({names[1]}) comes first" in text for text in said), said


def test_folder_of_adapters_that_is_not_there_is_a_warning(explained: ExplainRun) -> None:
    """No adapter was served, and nothing said so."""
    given = {"OPTION_ADAPTERS": "/nonexistent", "OPTION_ENABLE_LORA": "true"}
    (said,) = explained("", given).document["warnings"]
    assert said.startswith("option.adapters=/nonexistent (OPTION_ADAPTERS) is no folder")


def test_state_of_adapters_without_lora_is_a_warning(explained: ExplainRun) -> None:
    """The adapters in it were not served, and nothing said so."""
    (said,) = explained("", {"OPTION_ADAPTERS_STATE": "/x/state.json"}).document["warnings"]
    assert said.startswith("option.adapters_state=/x/state.json has no effect")
    given = {"OPTION_ADAPTERS_STATE": "/x/state.json", "OPTION_ENABLE_LORA": "true"}
    assert not explained("", given).document["warnings"]


def test_adapters_of_the_model_without_lora_are_a_warning(
    explained: ExplainRun, tmp_path: Path
) -> None:
    """A folder of adapters was passed over silently."""
    (tmp_path / "store" / "adapters" / "fr").mkdir(parents=True)
    (tmp_path / "store" / "config.json").write_text("{}")
    (said,) = [one for one in explained().document["warnings"] if "adapters" in one]
    assert said.endswith("store/adapters are not served: option.enable_lora is not true")
    enabled = explained("", {"OPTION_ENABLE_LORA": "true"}).document["warnings"]
    assert not any("not served" in one for one in enabled)


def test_two_words_for_true_hide_nothing(explained: ExplainRun, tmp_path: Path) -> None:
    """A list of adapters turns LoRA on by itself, and a chart says it, too."""
    given = {"SM_VLLM_LORA_MODULES": f"a={tmp_path}", "OPTION_ENABLE_LORA": "TRUE"}
    assert not explained("", given).document["warnings"]
    (said,) = explained("", given | {"OPTION_ENABLE_LORA": "False"}).document["warnings"]
    assert "is not used" in said


@pytest.mark.parametrize("text", ["18410", " 8080 "])
def test_a_port_is_no_address(explained: ExplainRun, text: str) -> None:
    """It was read as an IPv4 address in one number: the bind failed, without a name."""
    (said,) = explained("", {"SERVING_INFERENCE_ADDRESS": text}).document["errors"]
    assert "SERVING_INFERENCE_ADDRESS" in said
    assert said.endswith(f"a host is needed, too, such as http://0.0.0.0:{text.strip()}")


def test_variables_of_vllms_http_server_are_named(explained: ExplainRun) -> None:
    """Charts set them, and here they have no effect; what vLLM's engine reads has no row."""
    given = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60", "VLLM_LOG_STATS_INTERVAL": "5"}
    said = " ".join(explained("", given | {"VLLM_ATTENTION_BACKEND": "X"}).document["warnings"])
    assert all(f"{name} has no effect" in said for name in given)
    assert "VLLM_ATTENTION_BACKEND" not in said


def test_an_option_in_the_spelling_of_a_variable_is_named_for_the_file(
    explained: ExplainRun,
) -> None:
    """The advice was to write what was written."""
    (said,) = explained("OPTION_MAX_MODEL_LEN=64", {}).document["warnings"]
    assert said.endswith("write option.max_model_len")


def test_the_built_in_handler_is_named(explained: ExplainRun) -> None:
    """`null` looked as if the option had been lost."""
    row = explained("", {"OPTION_ENTRYPOINT": "djl_python.huggingface"}).option("entryPoint")
    assert row["value"] == "the built-in handler"
