"""config/quantization.md says of each value what the translation does with it."""

import re
from pathlib import Path

import pytest

from tests.unit.conftest import ExplainRun

PAGE = Path(__file__).resolve().parents[3] / "config" / "quantization.md"
ROWS = re.findall(r"^\| `([\w-]+)` \| `?([\w-]+)`? \| (.*) \|$", PAGE.read_text("utf-8"), re.M)
GUIDES = {  # the guides' values, issue 10
    "awq", "gptq", "squeezellm", "fp8", "bitsandbytes", "smoothquant", "dynamic_int8",
    "static_int8", "marlin", "awq_marlin", "gptq_marlin", "gguf",
}  # fmt: skip


def test_every_value_of_the_guides_has_a_row() -> None:
    """And the page's rows are found at all."""
    assert {value for value, _, _ in ROWS} >= GUIDES


@pytest.mark.parametrize(("value", "method", "words"), ROWS)
def test_table_row_matches_the_translation(
    tmp_path: Path, explained: ExplainRun, value: str, method: str, words: str
) -> None:
    """The argument, a warning where one is promised, an error where it says refused."""
    (tmp_path / "config.json").write_text('{"num_local_experts": 8}', encoding="utf-8")
    run = explained(f"option.quantize={value}", {"HF_MODEL_ID": str(tmp_path)})
    if method == "refused":
        assert any("option.quantize" in text for text in run.errors)
        assert not any("possible: allowed are" in text for text in run.errors)  # a reason first
        return
    assert run.errors == []
    assert run.engine_args["quantization"] == method
    said = [text for text in run.warnings if "quantiz" in text or "any more" in text]
    assert bool(said) == ("gone from vLLM" in words or ("the same" in words and method != value))
