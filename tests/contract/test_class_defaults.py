"""The recorded defaults are those of the installed Transformers' configuration classes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.releases import since
from tests.support.vllm_routes import script

pytestmark = pytest.mark.vllm
RECORD = script("record_class_defaults")
SCRIPTS = Path(__file__).parents[2] / "scripts"
PRINT = "import json, record_class_defaults as made; print(json.dumps(made.recorded()))"


@since("0.32", "the record is of its Transformers; 0.31 comes with an older one")
def test_record_is_that_of_the_installed_transformers() -> None:
    """`scripts/record_class_defaults.py` writes it again, from the start.

    In a process of its own: vLLM adds classes to Transformers' table as it meets their models.
    """
    pytest.importorskip("transformers")
    command = [sys.executable, "-c", PRINT]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(RECORD.RECORD.read_text(encoding="utf-8")) == found
