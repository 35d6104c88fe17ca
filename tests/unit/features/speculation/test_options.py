"""What LMI's names, vLLM's own and vLLM's older ones become."""

import pytest

from tests.unit.config.test_option_tables import Row, check_row
from tests.unit.conftest import ExplainRun

CASES = (
    Row("speculative_draft_model", "acme/draft", {"speculative_config": {
        "model": "acme/draft", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}}),
    Row("draft_model_id", "acme/draft", {"speculative_config": {
        "model": "acme/draft", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}}),
    Row("spec_length", "2", {"speculative_config": {
        "model": "d", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}},
        also="option.draft_model_id=d"),
    Row("speculative_length", "3", warns=True, warns_with="speculative_draft_model"),
    Row("draft_model_tp_size", "4", {"speculative_config": {
        "model": "d", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 4}},
        also="option.draft_model_id=d"),
    Row("draft_model_tp_size", "2", fails="must be 1", also="option.draft_model_id=d"),
    Row("record_acceptance_rate", "true", warns=True),
    Row("speculative_config", '{"method": "ngram"}', {"speculative_config": {"method": "ngram"}}),
    Row("speculative_config", "{broken", fails="JSON"),
    Row("speculative_model", "d", {"speculative_config": {
        "model": "d", "num_speculative_tokens": 4}}, also="option.num_speculative_tokens=4"),
    Row("speculative_model", "[ngram]", {"speculative_config": {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
        "prompt_lookup_min": 1}},
        also="option.num_speculative_tokens=4\noption.ngram_prompt_lookup_max=3\n"
        "option.ngram_prompt_lookup_min=1"),
    Row("num_speculative_tokens", "4", warns=True),
    Row("ngram_prompt_lookup_max", "4", warns=True),
    Row("ngram_prompt_lookup_min", "4", warns=True),
)  # fmt: skip


@pytest.mark.parametrize("row", CASES, ids=lambda row: row.id)
def test_option_becomes_an_argument(row: Row, explained: ExplainRun) -> None:
    """Every option, and each value that it treats apart."""
    check_row(row, explained)


@pytest.mark.parametrize(
    ("lmi", "value", "alias", "different"),
    [
        ("speculative_draft_model", "a", "draft_model_id", "b"),
        ("speculative_length", "3", "spec_length", "4"),
    ],
)
def test_two_names_of_one_setting_must_agree(
    lmi: str, value: str, alias: str, different: str, explained: ExplainRun
) -> None:
    """Equal after conversion is fine, different is an error naming both with their origins."""
    variable = f"OPTION_{alias.upper()}"
    assert explained(f"option.{lmi}={value}", {variable: value}).errors == []
    clash = explained(f"option.{lmi}={value}", {variable: different})
    assert clash.exit_code == 2
    assert any(f"option.{lmi}={value}" in text and variable in text for text in clash.errors)


def test_draft_names_and_speculative_config_exclude_each_other(explained: ExplainRun) -> None:
    """Both describe speculative decoding: an error naming both."""
    run = explained('option.speculative_config={"model": "a"}\noption.speculative_draft_model=b')
    assert "option.speculative_draft_model" in run.errors[0]
    assert "option.speculative_config" in run.errors[0]


def test_three_names_are_one_argument(explained: ExplainRun) -> None:
    """With no word said."""
    run = explained(
        "option.speculative_draft_model=acme/draft\noption.speculative_length=3\n"
        "option.draft_model_tp_size=1"
    )
    expected = {
        "model": "acme/draft", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1,
    }  # fmt: skip
    assert run.engine_args["speculative_config"] == expected
    assert (run.errors, [text for text in run.warnings if "specul" in text]) == ([], [])
