"""What does not go together with several front-end processes."""

import pytest

from tests.support.assembled import load_settings

CASES = {
    "too many": ({"LMI_FRONTEND_PROCESSES": "65"}, "at most 64"),
    "a Unix socket": (
        {"LMI_FRONTEND_PROCESSES": "2", "SERVING_INFERENCE_ADDRESS": "unix:/tmp/x"},
        "which one process can answer",
    ),
    "none": ({"LMI_FRONTEND_PROCESSES": "0"}, "LMI_FRONTEND_PROCESSES"),
}


@pytest.mark.parametrize(("environ", "text"), CASES.values(), ids=CASES)
def test_is_refused_with_its_name(environ: dict[str, str], text: str) -> None:
    """The error names the setting, its value and what else it collides with."""
    (error,) = load_settings(environ).errors
    assert text in error
    assert "LMI_FRONTEND_PROCESSES" in error


@pytest.mark.parametrize("count", ["1", "2", "64"])
def test_is_accepted(count: str) -> None:
    """With TCP, from one to 64; one also on a Unix socket."""
    assert load_settings({"LMI_FRONTEND_PROCESSES": count}).errors == ()
    unix = {"LMI_FRONTEND_PROCESSES": "1", "SERVING_INFERENCE_ADDRESS": "unix:/tmp/x"}
    assert load_settings(unix).errors == ()
