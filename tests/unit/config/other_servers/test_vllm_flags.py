"""Flags of `vllm serve` as our options, in the spellings of every recorded release."""

from pathlib import Path

import pytest

from lmi_vllm.config import vllm_schema
from lmi_vllm.config.other_servers import vllm_flags
from lmi_vllm.config.other_servers.vllm_flags import read_flags
from lmi_vllm.config.vllm_schema import read_release

RECORDS = Path(vllm_schema.__file__).parent / "data"


@pytest.mark.parametrize(
    ("release", "words", "expected"),
    [
        ("0.33", "--disable-prefix-caching", ("enable_prefix_caching", "false")),
        ("0.33", "--enable-sliding-window", ("disable_sliding_window", "false")),
        ("0.33", "--no-enable-lora", ("enable_lora", "false")),
        ("0.33", "--disable-lora", ("enable_lora", "false")),
        ("0.33", "-ep", ("enable_expert_parallel", "true")),
        ("0.32", "--no-enable-prefix-caching", ("enable_prefix_caching", "false")),
        ("0.31", "--enable-prefix-caching", ("enable_prefix_caching", "true")),
    ],
)
def test_switches_are_read_as_that_release_does(
    release: str, words: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.33 pairs --enable-x with --disable-x, and still takes --no-."""
    record = read_release(RECORDS / f"vllm_arguments_{release}.json")
    monkeypatch.setattr(vllm_flags, "load_release", lambda: record)
    (flag,) = read_flags([words])
    assert (flag.name, flag.text, flag.problem) == (*expected, "")


def test_flag_of_a_later_release_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.32 would refuse it as well."""
    record = read_release(RECORDS / "vllm_arguments_0.32.json")
    monkeypatch.setattr(vllm_flags, "load_release", lambda: record)
    (flag,) = read_flags(["--disable-prefix-caching"])
    assert "vLLM 0.32 has no such flag" in flag.problem
