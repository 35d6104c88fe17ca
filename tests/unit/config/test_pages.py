"""The generated pages and the samples in config/ hold what the table says.

That `make docs` would change nothing: `scripts/make_docs.py --check`, in `make check`.
"""

import json
import re
from pathlib import Path

import pytest

from lmi_vllm.config.properties import read_properties
from lmi_vllm.config.vllm_schema import load_release
from tests.support.assembled import OPTIONS
from tests.unit.conftest import ExplainRun

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = sorted((ROOT / "config" / "samples").glob("*.properties"))


def test_reference_names_every_option_and_argument() -> None:
    """No row of the table and no argument of vLLM is missing from the page."""
    page = (ROOT / "config" / "option-reference.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    written = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    rows = (*OPTIONS.rows.options, *OPTIONS.rows.server, *OPTIONS.rows.variables)
    assert {name for row in rows for name in (row.name, *row.aliases)} <= written
    assert set(load_release().engine) <= written


def test_every_row_has_a_description() -> None:
    """A row has a note, or a reason for having no effect."""
    for row in (*OPTIONS.rows.options, *OPTIONS.rows.server, *OPTIONS.rows.variables):
        assert row.note or row.effect.text or row.effect.is_fallback, row.name


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_sample_starts_and_fits_the_schema(sample: Path, explained: ExplainRun) -> None:
    """Samples have no errors; warnings only where they show older options."""
    run = explained(sample.read_text(encoding="utf-8"))
    assert run.errors == []
    assert bool(run.warnings) == (sample.stem == "from-lmi-dist"), run.warnings
    schema = json.loads((ROOT / "config" / "serving.properties.schema.json").read_text("utf-8"))
    for entry in read_properties(sample).entries:
        described = schema["properties"][entry.key]
        assert re.search(described.get("pattern", ""), entry.value)


def test_there_are_samples() -> None:
    """The folder was found."""
    assert len(SAMPLES) >= 8
