"""Which recorded release counts, and that every supported one is recorded."""

import re
import tomllib
from pathlib import Path

import pytest

from lmi_vllm.config import vllm_schema as vllm_arguments
from lmi_vllm.config.vllm_schema import installed_release, load_release, read_release
from lmi_vllm.translate import rules
from tests.unit.conftest import ExplainRun

ROOT = Path(__file__).resolve().parents[3]
RECORDS = sorted((ROOT / "lmi_vllm" / "config" / "data").glob("vllm_arguments_*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_record_reads(record: Path) -> None:
    """Each record is of the release in its name and has vLLM's best known arguments."""
    release = read_release(record)
    assert record.stem == f"vllm_arguments_{release.release}"
    assert {"model", "dtype", "max_model_len", "tensor_parallel_size"} <= set(release.engine)


def test_every_supported_release_is_recorded() -> None:
    """The range in pyproject.toml and the records name the same releases."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    low, high = re.findall(r"0\.(\d+)", project["optional-dependencies"]["cuda"][0])
    recorded = {record.stem.rsplit("_", 1)[1] for record in RECORDS}
    assert recorded == {f"0.{minor}" for minor in range(int(low), int(high))}


def test_load_release_is_the_installed_one_or_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM installed its own record counts; without, the newest."""
    for installed, expected in ((None, "0.33"), ("0.32", "0.32"), ("0.99", "0.33")):
        monkeypatch.setattr(vllm_arguments, "installed_release", lambda found=installed: found)
        assert load_release.__wrapped__().release == expected
    monkeypatch.undo()
    assert load_release().release in {"0.31", "0.32", "0.33"}
    assert installed_release() is None or installed_release() == load_release().release


def test_parser_of_an_unrecorded_release_is_only_warned_of(
    monkeypatch: pytest.MonkeyPatch, explained: ExplainRun
) -> None:
    """The names are those of a recorded release; another one that is installed may have more."""
    line = "option.model_id=a/b\noption.reasoning_parser=tomorrows"
    assert "tomorrows is not known" in explained(line).errors[0]
    monkeypatch.setattr(rules, "installed_release", lambda: "0.99")
    run = explained(line)
    assert run.errors == []
    assert "0.99 is installed" in run.warnings[-1]
