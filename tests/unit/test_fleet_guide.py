"""Guides of fleets and routers: options are valid, lines for proxies are those that are tested."""

import re
from pathlib import Path

import pytest

from integration.fleet.proxies import PROXIES
from tests.support.documentation import Block, blocks_of
from tests.unit.conftest import ExplainRun

BLOCKS = [*blocks_of("docs/fleet.md"), *blocks_of("docs/routers.md")]
OPTIONS = [block for block in BLOCKS if block.language == "properties"]
LINES = [line for block in BLOCKS if block.language == "text" for line in block.text.splitlines()]


@pytest.mark.parametrize("block", OPTIONS, ids=lambda block: block.name)
def test_options_of_a_step_are_valid(block: Block, explained: ExplainRun) -> None:
    """Each alone: known names, values that are understood, nothing that is missing."""
    names = [line.partition("=")[0].removeprefix("option.") for line in block.text.splitlines()]
    found = explained(block.text)
    said = [*found.errors, *found.warnings]
    assert [text for text in said if any(name in text for name in names)] == []


@pytest.mark.parametrize("line", LINES)
def test_line_of_a_proxy_is_run_by_the_test_of_a_fleet(line: str) -> None:
    """What is recommended is what was measured."""
    templates = [proxy.template.replace("{{", "{").replace("}}", "}") for proxy in PROXIES.values()]
    assert any(line in template for template in templates)


def test_every_step_says_what_runs_it() -> None:
    """A test, or that it needs a cluster."""
    page = (Path(__file__).parents[2] / "docs/fleet.md").read_text(encoding="utf-8")
    steps = page.split("\n## ")[1:]
    unmarked = [step.splitlines()[0] for step in steps if not re.search(r"Run by|needs: ", step)]
    assert unmarked in ([], [steps[-1].splitlines()[0]])


def test_steps_are_found() -> None:
    """The tests above see the page."""
    assert (len(OPTIONS), len(LINES)) == (5, 16)
