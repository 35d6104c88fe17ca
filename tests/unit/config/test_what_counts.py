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
    given = {"MODEL_ID": str(tmp_path / "model"), "NUM_SHARD": "1", "CUDA_GRAPHS": "0"}
    said = explained("", {**given, "ENABLE_CUDA_GRAPHS": "true"}).document["warnings"]
    assert any("CUDA_GRAPHS) is not used" in text and "ENABLE_CUDA" in text for text in said)
    agreeing = explained("", {**given, "ENABLE_CUDA_GRAPHS": "false"}).document["warnings"]
    assert not any("is not used" in text for text in agreeing)
