"""The systemd unit and the compose file: valid, consistent with the drain, nothing missing."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.assembled import load_settings

CONFIG = Path(__file__).parent.parent.parent / "config"
UNIT = CONFIG / "systemd" / "lmi-vllm.service"
COMPOSE = CONFIG / "compose" / "compose.yaml"


def drain_seconds() -> float:
    """Return how long a shutdown waits for requests by default."""
    seconds = load_settings({}).server.shutdown_timeout
    assert isinstance(seconds, int | float)
    return seconds


def services() -> dict[str, Any]:
    """Return the services of the compose file."""
    return dict(yaml.safe_load(COMPOSE.read_text())["services"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """No unknown directive, no bad value; only the program has to be one that is here."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/lmi/bin/lmi-vllm", "/bin/true"))
    answer = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, "")


def test_both_wait_for_the_drain() -> None:
    """Ten seconds more than the drain, for the end of the engine."""
    stop = re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) >= drain_seconds() + 10
    assert int(services()["lmi"]["stop_grace_period"].removesuffix("s")) >= drain_seconds() + 10


def test_mounts_of_compose_exist() -> None:
    """Files of the repository by their paths, volumes by their names."""
    volumes = yaml.safe_load(COMPOSE.read_text())["volumes"]
    mounts = [mount for service in services().values() for mount in service.get("volumes", [])]
    assert len(mounts) == 7
    for mount in mounts:
        source = mount.split(":")[0]
        assert source in volumes or (COMPOSE.parent / source).exists(), mount
    assert (COMPOSE.parent / services()["lmi"]["env_file"]).is_file()


def test_prometheus_scrapes_where_the_server_listens() -> None:
    """One address in both files."""
    scraped = yaml.safe_load((CONFIG / "prometheus" / "prometheus.yml").read_text())
    (target,) = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    address = services()["lmi"]["environment"]["SERVING_INFERENCE_ADDRESS"]
    assert address == f"http://{target}"
