"""The examples for the SageMaker SDK, run by each major version: the recorded requests are theirs.

Each SDK gets an environment of its own (a hundred packages), so only where asked:
LMI_TEST_SDKS=1; LMI_TEST_SDKS=record writes the recordings again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECORDER = ROOT / "tests" / "support" / "sagemaker_recording.py"
GOLDEN = ROOT / "tests" / "golden" / "sagemaker"
# Example -> what pip installs for it. Of version 3 the example needs the core alone.
SDKS = {"with_sdk_v2": "sagemaker==2.*", "with_sdk_v3": "sagemaker>=3"}
ENVIRON = {
    "PATH": os.environ.get("PATH", ""),
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "HOME": "/nonexistent",  # no credentials and no settings of the user who runs this
}

pytestmark = pytest.mark.skipif(not os.environ.get("LMI_TEST_SDKS"), reason="needs LMI_TEST_SDKS=1")


@pytest.mark.parametrize("example", SDKS)
def test_sdk_makes_the_recorded_requests(example: str) -> None:
    """Nothing is sent; what botocore was asked to send is the recording."""
    python = interpreter(ROOT / f".venv-{example}", SDKS[example])
    command = [python, RECORDER, ROOT / "config" / "sagemaker" / f"{example}.py"]
    done = subprocess.run(
        command, env=ENVIRON, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    recording = GOLDEN / f"{example}.json"
    if os.environ["LMI_TEST_SDKS"] == "record":
        recording.parent.mkdir(exist_ok=True)
        recording.write_text(done.stdout)
    assert json.loads(done.stdout) == json.loads(recording.read_text())


def interpreter(folder: Path, requirement: str) -> Path:
    """Return the Python of an environment with an SDK in it, made once."""
    python = folder / "bin" / "python"
    has_it = [python, "-c", "import sagemaker.core.resources, boto3"]
    if "==2" in requirement:
        has_it[-1] = "import sagemaker.model"
    if python.exists() and subprocess.run(has_it, capture_output=True, check=False).returncode == 0:
        return python
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "-q", requirement]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs {requirement} from the package index: {done.stderr[-300:]}")
    return python
