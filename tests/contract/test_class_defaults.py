"""The recorded defaults are those of the installed Transformers' configuration classes."""

import json

import pytest

from tests.support.vllm_routes import script

pytestmark = pytest.mark.vllm
RECORD = script("record_class_defaults")


def test_record_is_that_of_the_installed_transformers() -> None:
    """`scripts/record_class_defaults.py` writes it again, from the start."""
    pytest.importorskip("transformers")
    assert json.loads(RECORD.RECORD.read_text(encoding="utf-8")) == RECORD.recorded()
