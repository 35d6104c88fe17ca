"""The record of a request."""

import pytest

from lmi_vllm.telemetry.records import RequestRecord


@pytest.mark.parametrize(
    ("client", "source"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("", ""),
    ],
)
def test_addresses_of_one_network_are_one_source(client: str, source: str) -> None:
    """A machine with IPv6 may choose another address for each request; a key is one client."""
    assert RequestRecord("", "", "", "", client, "").source == source
    assert RequestRecord("", "", "", "", client, "", key=3).source == "key 3"
