"""Which listeners have the console."""

import pytest

from lmi_vllm.config.listen import read_address
from lmi_vllm.features.console.routes import console
from lmi_vllm.server.listeners import ListenerContext
from tests.support.assembled import load_settings


@pytest.mark.parametrize(
    ("told", "address", "has_key", "expected"),
    [
        ("auto", "http://127.0.0.1:8080", False, True),
        ("auto", "http://127.8.8.8:8080", False, True),
        ("auto", "http://localhost:8080", False, True),
        ("auto", "http://[::1]:8080", False, True),
        ("auto", "http://0.0.0.0:8080", False, False),
        ("auto", "http://[::]:8080", False, False),
        ("auto", "http://10.0.0.1:8080", False, False),
        ("auto", "http://example.com:8080", False, False),
        ("auto", "unix:/run/s", False, False),
        ("auto", "http://0.0.0.0:8080", True, True),
        ("on", "http://0.0.0.0:8080", False, True),
        ("off", "http://127.0.0.1:8080", True, False),
    ],
)
def test_console_is_on_by_default_only_on_loopback_or_with_a_key(
    told: str, address: str, has_key: bool, expected: bool
) -> None:
    """By itself on loopback, or behind a key; else as it was told."""
    settings, listening = load_settings({"LMI_CONSOLE": told}), read_address(address)
    context = ListenerContext(settings, {}, dict, listening, has_key=has_key)
    assert (console(context) is not None) is expected
