"""Paths whose requests have no line in the log, however they are written."""

import argparse
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmi_vllm.commands.explain import add_source_arguments, command_line_of
from lmi_vllm.features.request_log.settings import choosing_lines
from tests.support.assembled import CONFIGURATION, load_settings


@pytest.mark.parametrize("text", ["/health,/metrics", "health,metrics/", "/health/,/metrics"])
async def test_paths_are_read_with_and_without_slashes(text: str) -> None:
    """`health` is no path, so its requests had their line, silently."""
    parser = argparse.ArgumentParser()
    add_source_arguments(parser)
    arguments = parser.parse_args([])
    arguments.vllm_words = ["a/b", "--disable-access-log-for-endpoints", text]
    settings = load_settings({}, command_line_of(arguments, CONFIGURATION.options))
    log = SimpleNamespace(quiet_paths=frozenset(), is_quiet=False)
    service = SimpleNamespace(telemetry=SimpleNamespace(request_log=log))
    async with choosing_lines(cast("Any", service), settings):
        assert log.quiet_paths == {"/health", "/metrics"}
