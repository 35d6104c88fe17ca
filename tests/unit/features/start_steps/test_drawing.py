"""The line that a start draws on a terminal."""

from typing import Any

import pytest

from lmi_vllm.features.start_steps.drawing import line

BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "settings": ({"phase": "settings", "elapsed_seconds": 0.4}, "settings, 0 s"),
    "download": (
        {"phase": "download", "elapsed_seconds": 12.4, "bytes": 1_050_000_000,
         "bytes_total": 16_060_000_000, "seconds_left": 178},
        "download, 1.05 of 16.06 GB, 12 s, 178 s left",
    ),
    "weights": (
        {"phase": "engine", "step": "weights", "elapsed_seconds": 30, "weight_files": 1,
         "weight_files_total": 4, "weight_bytes": 4_976_000_000,
         "weight_bytes_total": 16_060_000_000},
        "weights, 4.976 of 16.06 GB, 1 of 4 files, 30 s",
    ),
    "graphs": (
        {"phase": "engine", "step": "graphs", "elapsed_seconds": 31, "graphs_total": 51,
         "weight_files_total": 4},
        "graphs, 0 of 51 graphs, 31 s",
    ),
    "compilation": (
        {"phase": "engine", "step": "compilation", "elapsed_seconds": 146},
        "compilation, 146 s, none with --enforce-eager",
    ),
    "cache": (
        {"phase": "engine", "step": "compilation", "elapsed_seconds": 9, "from_cache": True},
        "compilation, from the cache, 9 s",
    ),
    "KV cache": (
        {"phase": "engine", "step": "KV cache", "elapsed_seconds": 9, "kv_cache_gib": 108.4,
         "kv_cache_tokens": 888_000.0},
        "KV cache, 108.4 GiB, 888,000 tokens, 9 s",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("status", "text"), BODIES.values(), ids=BODIES)
def test_line_has_the_step_its_figures_and_the_time(status: dict[str, Any], text: str) -> None:
    """A step rather than its phase; what is unknown is left out."""
    assert line({"llama": {"status": "PENDING", **status}}) == f"llama: {text}"
