"""`explain` shows of each deployment of another server what its author asked for."""

from pathlib import Path

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import CONFIGURATION, explain, translate_start
from tests.support.other_servers import DEPLOYMENTS, Deployment, started


@pytest.mark.parametrize("row", DEPLOYMENTS, ids=lambda row: row.place)
def test_rows_are_those_that_were_asked_for(row: Deployment, tmp_path: Path) -> None:
    """Each value that the place sets has its row, whose origin is not a default."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (model / name).symlink_to(DEMO_MODEL_DIR / name)
    adapter = DEMO_MODEL_DIR / "adapters" / "json"
    start = started(row, {"model": str(model), "adapter": str(adapter), "tls": str(tmp_path)})
    environ, settings = start.environ, start.settings
    read = CONFIGURATION.reader(environ)
    translation = translate_start(settings, environ, Devices(0), read)
    found = explain(translation)
    assert found.errors == ()
    shown = {str(option["name"]): option for option in found.options}
    assert {name: shown[name]["value"] for name in start.rows} == start.rows
    assert all(shown[name]["origin"] != "default" for name in start.rows)
    assert settings.server.inference_address == row.address
    assert settings.server.shutdown_timeout == row.drain
