"""Record what the installed vLLM's command line accepts, as data for lmi_vllm/config/.

`explain` must know every engine argument without importing vLLM (11 s, torch included), so names,
kinds, choices and defaults are kept per release in
lmi_vllm/config/data/vllm_arguments_<release>.json. Run it where vLLM is installed:
`python scripts/record_vllm_arguments.py [--check]`.
"""

import argparse
import dataclasses
import enum
import json
import re
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path

TARGET_FOLDER = Path(__file__).resolve().parent.parent / "lmi_vllm" / "config" / "data"
HUMAN_KINDS = {
    "human_readable_int": "human_int",
    "human_readable_int_or_auto": "human_int_or_auto",
    "union_dict_and_str": "json_or_text",
    "parse_dataclass": "json_config",
}
PLAIN_KINDS: dict[object, str] = {str: "text", int: "int", float: "float", json.loads: "json"}


def unwrap(parse: object) -> tuple[object, bool]:
    """The innermost parser and whether vLLM's optional_type (accepts None) is around it."""
    optional = False
    while isinstance(parse, types.FunctionType) and parse.__name__ in (
        "_optional_type",
        "_parse_type",
    ):
        optional = optional or parse.__name__ == "_optional_type"
        parse = inspect_closure(parse, "return_type")
    return parse, optional


def inspect_closure(function: types.FunctionType, name: str) -> object:
    """The value a closure variable of `function` holds."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells[name].cell_contents


def kind_of(action: argparse.Action, parse: object) -> str:
    """Our word for how `action` reads its text."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    if action.nargs == 0:
        return "flag"
    if action.nargs == "?":
        return "bool_or_text"
    name = getattr(parse, "__name__", "")
    if name == "<lambda>":  # vLLM has two: case-folded choices and the device list
        return "folded_text" if action.choices else "device_ids"
    if name in HUMAN_KINDS:
        return HUMAN_KINDS[name]
    return PLAIN_KINDS.get(parse, "text")


def plain(value: object) -> object:
    """`value` as JSON can hold it; None where only Python could."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, set | frozenset | tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return None if value == argparse.SUPPRESS else value
    return None


def first_sentence(text: str | None) -> str:
    """The first sentence of an argument's help, on one line."""
    opening = re.split(r"\n\n|:?\s*\n\s*- ", (text or "").replace("%%", "%"))[0]
    paragraph = " ".join(opening.replace("``", "`").split())
    if paragraph.startswith("API docs:"):
        return ""
    return re.split(r"(?<=[.!?]) (?=[A-Z`\"])", paragraph, maxsplit=1)[0]


def is_opposite(text: str, flag: str) -> bool:
    """Whether one is --enable-x and the other --disable-x."""
    pair = ("--enable-", "--disable-")
    return any(
        flag.startswith(one) and text == other + flag.removeprefix(one)
        for one, other in (pair, pair[::-1])
    )


def describe(action: argparse.Action) -> dict[str, object]:
    """One argument as recorded data."""
    parse, optional = unwrap(action.type)
    row: dict[str, object] = {"kind": kind_of(action, parse)}
    if action.nargs in ("+", "*"):
        row["list"] = True
    if optional:
        row["optional"] = True
    choices = [plain(choice) for choice in action.choices or () if choice is not None]
    if choices:
        row["choices"] = choices
    flag = action.dest.replace("_", "-")
    also = [text for text in action.option_strings if text not in (f"--{flag}", f"--no-{flag}")]
    off = [text for text in also if is_opposite(text, f"--{flag}")]
    if off:  # from 0.33: --disable-x beside --enable-x, and the other way round
        row["off"] = off
    if flags := [text for text in also if text not in off]:
        row["also"] = flags
    row["default"] = plain(action.default)
    row["help"] = first_sentence(action.help)
    return row


def describe_parser(add: Callable[..., argparse.ArgumentParser]) -> dict[str, dict[str, object]]:
    """Every argument `add` puts on a parser, by name."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = add(FlexibleArgumentParser(add_help=False))
    return {action.dest: describe(action) for action in parser._actions if action.option_strings}


def registered(names: Iterable[object]) -> list[str]:
    """Sorted names of a vLLM registry."""
    return sorted(str(name) for name in names)


def front_end_parser() -> Callable[..., argparse.ArgumentParser]:
    """VLLM's own make_arg_parser, from where this release keeps it."""
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # noqa: PLC0415 (from 0.33)
    except ImportError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
    return make_arg_parser


def record() -> tuple[str, dict[str, object]]:
    """The installed release (major.minor) and everything recorded about it."""
    sys.argv.append("--help")  # arg_utils collects help texts only when it sees this
    import vllm.version  # noqa: PLC0415
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415

    make_arg_parser = front_end_parser()
    from vllm.model_executor.layers import quantization  # noqa: PLC0415
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER  # noqa: PLC0415
    from vllm.model_executor.models import ModelRegistry  # noqa: PLC0415
    from vllm.reasoning import ReasoningParserManager  # noqa: PLC0415
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415

    engine = describe_parser(AsyncEngineArgs.add_cli_args)
    front_end = describe_parser(make_arg_parser)
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    release = ".".join(vllm.version.__version__.split(".")[:2])
    return release, {
        "release": release,
        "engine_arguments": {name: row for name, row in engine.items() if name in fields},
        "front_end_arguments": {n: row for n, row in front_end.items() if n not in engine},
        "command_line_only": sorted(set(engine) - fields),
        "fields_without_flag": sorted(f for f in fields - set(engine) if not f.startswith("_")),
        "sampling_fields": registered(
            name for name in SamplingParams.__struct_fields__ if not name.startswith("_")
        ),
        "quantization_methods": registered(quantization.QUANTIZATION_METHODS),
        "deprecated_quantization_methods": registered(quantization.DEPRECATED_QUANTIZATION_METHODS),
        "load_formats": registered(_LOAD_FORMAT_TO_MODEL_LOADER),
        "tool_parsers": registered(ToolParserManager.list_registered()),
        "reasoning_parsers": registered(ReasoningParserManager.list_registered()),
        "architectures": registered(ModelRegistry.get_supported_archs()),
    }


def store(target: Path, text: str) -> int:
    """Write a record, or with --check say whether the stored one still holds; the exit code."""
    if "--check" not in sys.argv:
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return 0
    if target.is_file() and target.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{target} is stale: run scripts/{Path(sys.argv[0]).name}\n")
    return 1


def main() -> int:
    """Write the record, or check it."""
    release, data = record()
    target = TARGET_FOLDER / f"vllm_arguments_{release}.json"
    return store(target, json.dumps(data, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
