"""HTTPRoute and ScaledObject by the schemas that are generated from their controllers' own types.

`scripts/install_test_tools.py` installs them from npm, by `tests/support/published_schemas`.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "config" / "kubernetes"
SCHEMAS = ROOT / ".venv" / "published-schemas"
VALIDATE = """
import { HTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
const kinds = { HTTPRoute, ScaledObject };
const valid = JSON.parse(process.argv[1]).map((resource) => {
  try { new kinds[resource.kind](resource).validate(); return true; }
  catch (error) { console.error(error.message); return false; }
});
console.log(JSON.stringify(valid));
"""


@pytest.mark.skipif(
    shutil.which("node") is None or not (SCHEMAS / "node_modules").is_dir(),
    reason="needs node and npm: scripts/install_test_tools.py",
)
def test_custom_resources_are_valid_by_published_schemas() -> None:
    """Of each a broken one is refused."""
    route, scaled = load("http-route.yaml"), load("scaled-object.yaml")
    broken_route, broken_scaled = load("http-route.yaml"), load("scaled-object.yaml")
    broken_route["spec"]["rules"][0]["timeouts"]["request"] = 5
    del broken_scaled["spec"]["triggers"][0]["metadata"]
    given = json.dumps([route, scaled, broken_route, broken_scaled])
    command = ("node", "--input-type=module", "-e", VALIDATE, given)
    done = subprocess.run(command, cwd=SCHEMAS, check=False, capture_output=True, text=True)
    assert json.loads(done.stdout or "null") == [True, True, False, False], done.stderr


def load(name: str) -> Any:
    """Return the one document of a file."""
    return yaml.safe_load((FOLDER / name).read_text())
