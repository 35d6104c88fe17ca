"""What `explain` says of a state that replicas could not share."""

import pytest

from tests.unit.conftest import ExplainRun


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("s3://bucket", "expected s3://bucket/key of one object"),
        ("s3://bucket/folder/", "expected s3://bucket/key of one object"),
        ("file://other/state.json", "names the machine other: write file:///path"),
        ("ftp://bucket/key", "is no URL of a store, such as s3://"),
    ],
)
def test_place_of_no_object_is_an_error(explained: ExplainRun, place: str, reason: str) -> None:
    """Found before a model is fetched."""
    found = explained("", {"OPTION_ADAPTERS_STATE": place})
    assert [text for text in found.errors if place in text and reason in text]


@pytest.mark.parametrize(
    "place", ["s3://bucket/key", "/var/state.json", "file:///x.json", "file://localhost/x"]
)
def test_object_and_file_are_fine(explained: ExplainRun, place: str) -> None:
    """A path is this server's own state."""
    found = explained("", {"OPTION_ADAPTERS_STATE": place})
    assert not [text for text in found.errors if "adapters_state" in text]


def test_refresh_that_is_too_rare_to_confirm_calls_is_named(explained: ExplainRun) -> None:
    """Replicas that report less often than that do not count as running."""
    place = {"OPTION_ADAPTERS_STATE": "s3://bucket/key"}
    seldom = explained("option.adapters_state_refresh_seconds=90\n", place)
    assert [text for text in seldom.warnings if "=90: with more than 20 s" in text]
    often = explained("option.adapters_state_refresh_seconds=20\n", place)
    assert not [text for text in often.warnings if "refresh_seconds" in text]
