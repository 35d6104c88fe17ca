"""The record of a request."""

import pytest

from lmi_vllm.telemetry.observers import RequestTotals
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


@pytest.mark.parametrize(
    ("answered", "failed", "left", "cut", "words"),
    [
        (0, 0, 0, 0, ""),
        (1, 0, 0, 0, "1 request answered"),
        (2, 1, 0, 0, "2 requests answered, 1 refused or failed"),
        (0, 0, 3, 1, "3 left by their clients, 1 of those in flight cut off"),
    ],
)
def test_totals_name_what_happened_and_no_zeros(
    answered: int, failed: int, left: int, cut: int, words: str
) -> None:
    """The last line of a server that did nothing was four zeros long."""
    assert RequestTotals(answered, failed, left).in_words(cut) == words
