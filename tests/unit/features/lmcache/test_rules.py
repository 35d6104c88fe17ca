"""LMCache's package: named where it is missing, before a byte of the model is fetched."""

import pytest

from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.lmcache import rules
from lmi_vllm.server.plan import plan_start
from tests.support.assembled import CONFIGURATION, PARTS, load_settings
from tests.support.hub_server import Repository, hub_server
from tests.unit.conftest import ExplainRun

ASKS = (
    "option.lmcache_auto_config=true",
    "option.lmcache_config_file=lmcache.yaml",
    'option.kv_transfer_config={"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}',
)
OTHERS = (
    "option.lmcache_auto_config=false",
    'option.kv_transfer_config={"kv_connector":"P2pNcclConnector","kv_role":"kv_both"}',
)


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let these packages be all that is installed."""
    monkeypatch.setattr(rules, "is_installed", lambda package: package in packages)


@pytest.mark.parametrize("line", ASKS)
def test_missing_package_is_an_error_with_the_install_command(
    explained: ExplainRun, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Where vLLM is installed; on a machine without it, which serves nothing, a warning."""
    install(monkeypatch, "vllm")
    (error,) = explained(line).errors
    assert 'pip install "lmi-vllm[lmcache]"' in error
    assert line.split("=", maxsplit=1)[0] in error
    install(monkeypatch)
    run = explained(line)
    assert run.errors == []
    assert any("lmi-vllm[lmcache]" in warning for warning in run.warnings)
    install(monkeypatch, "vllm", "lmcache")
    run = explained(line)
    assert (run.errors, [text for text in run.warnings if "lmcache" in text.lower()]) == ([], [])


@pytest.mark.parametrize(
    "connector",
    [
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
        '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
        '{"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]}}',
    ],
)
def test_missing_nixl_is_an_error_too(
    connector: str, explained: ExplainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Charts that split prefill and decode ask for it; the engine ended after a minute."""
    install(monkeypatch, "vllm")
    (error,) = explained(f"option.kv_transfer_config={connector}", {}).errors
    assert error.endswith("needs the package nixl: pip install nixl")
    install(monkeypatch, "vllm", "nixl")
    assert explained(f"option.kv_transfer_config={connector}", {}).errors == []


@pytest.mark.parametrize("line", OTHERS)
def test_package_that_is_not_asked_for_may_be_missing(
    explained: ExplainRun, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Other connectors need other packages."""
    install(monkeypatch, "vllm")
    assert explained(line).errors == []


def test_start_ends_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a start is refused; the hub has been asked for config.json alone."""
    install(monkeypatch, "vllm")
    with hub_server(
        acme__tiny=Repository({"config.json": b"{}", "model.safetensors": b"w"})
    ) as hub:
        environ = {
            "HF_MODEL_ID": "acme/tiny",
            "HF_ENDPOINT": hub.url,
            "OPTION_LMCACHE_AUTO_CONFIG": "true",
        }
        with pytest.raises(ConfigurationError, match=r"lmi-vllm\[lmcache\]"):
            plan_start(CONFIGURATION, PARTS.start, load_settings(environ), environ, {})
        assert {path.rpartition("/")[2] for path in hub.paths("GET")} == {"config.json"}


def test_cpu_is_warned_that_nothing_is_kept(explained: ExplainRun) -> None:
    """LMCache starts there and finds no connector."""
    for gpus, count in (("0", 1), ("1", 0)):
        warnings = explained(ASKS[0], "", "--gpus", gpus).warnings
        assert sum("no connector for a CPU" in warning for warning in warnings) == count
