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

The table has every route that the HTTP application of vLLM {releases} can have. *Answered by* says what this server does:

| answered by | meaning |
| --- | --- |
| ours | A route of this server. An OpenAI route answers with vLLM's body. |
| vLLM | [vLLM's own application](vllm-differences.md#vllm-routes) in this server. Inference waits in the queue, with limits and adapters; *information* does not. |
| vLLM, with a key | It acts on the server. It needs vLLM's own switch and `LMI_API_KEY`. If there is a management address, it is there. |
| refused | 404, with the reason in the last column. |

If *there with* names a switch or a task, the route is 404 without it. Routes of `--enable-scale-out` are 403 without it. A
switch that is an argument has an option of its name, such as `option.enable_scale_out=true`.

Tests compare the table with the application of the installed release, and with the recorded routes of the others
(`scripts/record_vllm_routes.py`). A server reads its routes from the application that it loads.
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
