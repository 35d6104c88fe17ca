"""The page docs/vllm-routes.md, from config/vllm-routes/ (scripts/make_docs.py)."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from http_api_page import table

FOLDER: Final = Path(__file__).resolve().parent.parent / "config" / "vllm-routes"
ANSWERS: Final = "answers.json"

INTRODUCTION: Final = """\
# Routes of vLLM

This page is for people who call routes of `vllm serve`. After it you know which of them this server has.

Generated from `config/vllm-routes/` by `make docs`. Do not edit.

Every route that the HTTP application of vLLM {releases} can have, and what this server does with it:

- **ours**: a route of this server's own, with vLLM's body where it is an OpenAI route.
- **vLLM**: [handed to vLLM's own application](requests.md#vllm-routes), which runs inside of this server. Routes of
  inference wait in the queue, and have its limits and its adapters. Routes of information are answered at once.
- **vLLM, with a key**: a route that acts on the server. It is there only with vLLM's own switch, refuses to work without
  `LMI_API_KEY`, and is on the management address where there is one.
- **refused**: 404, with the reason in the last column.

A route that a column *there with* names something for is missing otherwise (404), but the routes of `--enable-scale-out`,
which are 403 then. The switches that are arguments have options of their names, such as `option.enable_scale_out=true`.
Tests hold the table to the application of the installed release and to the recorded routes of the others
(`scripts/record_vllm_routes.py`). Which of them a server has, it reads from the application that it loads.
"""  # noqa: E501 - lines of the page
WORDS: Final[Mapping[str, str]] = {
    "inference": "vLLM",
    "information": "vLLM (information)",
    "management": "vLLM, with a key",
}


def recorded() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return the routes of each release, by release and path, the oldest release first."""
    return {
        file.stem: {row["path"]: row for row in json.loads(file.read_text(encoding="utf-8"))}
        for file in sorted(FOLDER.glob("0.*.json"))
    }


def answers() -> Mapping[str, Mapping[str, str]]:
    """Return what is done with each path."""
    rows = json.loads((FOLDER / ANSWERS).read_text(encoding="utf-8"))
    return {row["path"]: row for row in rows}


def vllm_routes_page() -> str:
    """Return the page."""
    releases = recorded()
    *before, last = releases
    introduction = INTRODUCTION.format(releases=f"{', '.join(before)} and {last}")
    head = ("route", *releases, "there with", "answered by", "remark")
    return "\n".join((introduction, *table(head, _rows(releases)), ""))


def _rows(releases: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[tuple[str, ...]]:
    for path, answer in answers().items():
        found = [routes[path] for routes in releases.values() if path in routes]
        methods = ", ".join(dict.fromkeys(name for row in found for name in row["methods"]))
        there = ("yes" if path in routes else "" for routes in releases.values())
        by = WORDS[answer["acts"]] if answer["by"] == "bridge" else answer["by"]
        needed = "" if answer["by"] == "ours" else _condition(found[-1])
        yield (f"`{methods} {path}`", *there, needed, by, answer.get("why", ""))


def _condition(row: Mapping[str, Any]) -> str:
    switches = ", ".join(f"`{name}`" for name in row["needs"])
    tasks = f"models that {', '.join(row['tasks'])}" if row["tasks"] else ""
    return "; ".join(filter(None, (switches, tasks)))
