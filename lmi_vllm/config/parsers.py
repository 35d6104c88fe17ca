"""Parsers from the text of a setting to its value; each raises ValueError with what is allowed.

Each kind of value is read in the same way from every source (docs/option-values.md).
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

Parser = Callable[[str], object]

_BOOLEANS: Final[Mapping[str, bool]] = MappingProxyType(
    {
        **dict.fromkeys(("true", "1", "yes", "on", "t", "y"), True),
        **dict.fromkeys(("false", "0", "no", "off", "f", "n"), False),
    }
)
_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("fp32", "float32"), "float32"),
        **dict.fromkeys(("fp16", "float16"), "float16"),
        **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
        "auto": "auto",
        "half": "half",
        "float": "float",
    }
)
_DECIMAL: Final = MappingProxyType({"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12})
_BINARY: Final = MappingProxyType({"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40})
_LIST_NEEDED: Final = 'a list is needed: ["a", "b"] or a,b'
_LONGEST_NUMBER: Final = 40  # digits: longer text is no setting, and int() takes quadratic time


def boolean(text: str) -> bool:
    """True or false; surrounding blanks are refused, as in LMI."""
    try:
        return _BOOLEANS[text.lower()]
    except KeyError:
        raise ValueError("allowed are true/false, 1/0, yes/no, on/off, t/f and y/n") from None


def java_true(text: str) -> bool:
    """A boolean as LMI's Java code reads it: `true` in any case is true, everything else false."""
    return text.lower() == "true"


def any_text(text: str) -> str:
    """The text itself, unchecked: for names whose value has no effect."""
    return text


def verbatim(text: str) -> str:
    """The text itself, also `None`: for a key or a limit, unset would mean open."""
    return text


def plain_text(text: str) -> str:
    """Text that is not a boolean by mistake (`tokenizer_mode=true`)."""
    if text.lower() in ("true", "false"):
        raise ValueError("this option takes text, not true or false")
    return text


def whole_number(text: str) -> int:
    """An integer; `4.0` counts as one."""
    stripped = text.strip()
    if re.fullmatch(r"[+-]?\d+(\.0*)?", stripped) and len(stripped) <= _LONGEST_NUMBER:
        return int(stripped.split(".")[0])
    raise ValueError("a whole number is needed")


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    return _at_least(whole_number, text, 1)


def count(text: str) -> int:
    """An integer of at least 0."""
    return _at_least(whole_number, text, 0)


def _at_least(parse: Callable[[str], int], text: str, lowest: int) -> int:
    """`parse(text)` when it is not below `lowest`."""
    message = f"a whole number of at least {lowest} is needed"
    try:
        number = parse(text)
    except ValueError:
        raise ValueError(message) from None
    if number < lowest:
        raise ValueError(message)
    return number


def real_number(text: str) -> float:
    """A finite number."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError("a number is needed") from None
    if not math.isfinite(number):
        raise ValueError("a finite number is needed")
    return number


def fraction(text: str) -> float:
    """A share above 0 and up to 1."""
    number = real_number(text)
    if not 0 < number <= 1:
        raise ValueError("a number above 0 and up to 1 is needed, such as 0.9")
    return number


def gigabytes(text: str) -> float:
    """A size in GB, not negative."""
    number = real_number(text)
    if number < 0:
        raise ValueError("a size in GB of at least 0 is needed")
    return number


def seconds(text: str) -> float:
    """A duration above 0; whole seconds stay integers."""
    number = real_number(text)
    if number <= 0:
        raise ValueError("a number of seconds above 0 is needed")
    return int(number) if number.is_integer() else number


def seconds_or_off(text: str) -> float:
    """A duration, 0 meaning off."""
    number = real_number(text)
    if number < 0:
        raise ValueError("a number of seconds is needed, 0 switches it off")
    return int(number) if number.is_integer() else number


def human_int(text: str) -> int:
    """An integer that may end in k/m/g/t (powers of 1000) or K/M/G/T (powers of 1024)."""
    stripped = text.strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", stripped)
    if match is None or len(stripped) > _LONGEST_NUMBER:
        try:
            return whole_number(stripped)
        except ValueError:
            message = "a whole number such as 16384, 16k (16000) or 16K (16384) is needed"
            raise ValueError(message) from None
    number, suffix = match.groups()
    if suffix in _DECIMAL:
        return int(float(number) * _DECIMAL[suffix])
    if "." in number:
        raise ValueError(f"{suffix} is binary and takes no decimals; {suffix.lower()} does")
    return int(number) * _BINARY[suffix]


def human_int_or_auto(text: str) -> int:
    """As `human_int`; `auto` and -1 mean: as long as memory allows."""
    if text.strip().lower() in ("auto", "-1"):
        return -1
    return human_int(text)


def positive_human_int(text: str) -> int:
    """As `human_int`, but at least 1."""
    return _human_at_least(text, 1)


def human_count(text: str) -> int:
    """As `human_int`, but at least 0."""
    return _human_at_least(text, 0)


def _human_at_least(text: str, lowest: int) -> int:
    number = human_int(text)
    if number < lowest:
        message = f"a whole number of at least {lowest} is needed, such as 16384, 16k or 16K"
        raise ValueError(message)
    return number


def _refuse_constant(name: str) -> object:
    """Refuse NaN and Infinity: Python reads them as JSON, other readers do not."""
    raise ValueError(f"{name} is no JSON")


def json_value(text: str) -> object:
    """The value of the JSON text."""
    try:
        value: object = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"JSON is needed ({error})") from None
    return value


def json_object(text: str) -> dict[str, object]:
    """A JSON object."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise ValueError('a JSON object is needed, such as {"name": "value"}')
    return value


def modality_limits(text: str) -> dict[str, object]:
    """A JSON object, or the older `image=4,video=2`."""
    if text.lstrip().startswith("{"):
        return json_object(text)
    limits: dict[str, object] = {}
    for part in text.split(","):
        name, separator, number = part.partition("=")
        if not separator or not name.strip():
            raise ValueError('use {"image": 4, "video": 2} or image=4,video=2')
        limits[name.strip()] = count(number)
    return limits


def items(text: str) -> list[object]:
    """A JSON array, else a comma-separated list."""
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    value = json_value(text)
    if not isinstance(value, list):
        raise ValueError(_LIST_NEEDED)
    return value


def words(text: str) -> list[str]:
    """A JSON array of texts, else a comma-separated list."""
    found = [item for item in items(text) if isinstance(item, str)]
    if len(found) < len(items(text)):
        raise ValueError(_LIST_NEEDED)
    return found


def lora_modules(text: str) -> dict[str, str]:
    """Sources of adapters by name, in the forms of `vllm serve --lora-modules`.

    A JSON object `{"name": …, "path": …}` may have more keys, such as base_model_name.
    """
    stripped = text.strip()
    found = [json_object(stripped)] if stripped.startswith("{") else items(stripped)
    modules: dict[str, str] = {}
    for item in found:
        is_object = isinstance(item, dict) or str(item).startswith("{")
        pairs = [item] if is_object else str(item).split()
        for pair in pairs:
            name, source = _lora_module(pair)
            if modules.setdefault(name, source) != source:
                raise ValueError(f"{name} has two sources")
    if not modules:
        raise ValueError('name=path is needed, or {"name": …, "path": …}')
    return modules


def _lora_module(item: object) -> tuple[str, str]:
    """Name and source of one adapter."""
    if isinstance(item, str) and item.startswith("{"):
        item = json_object(item)
    name = source = ""
    if isinstance(item, str):
        name, _, source = item.partition("=")
    elif isinstance(item, dict):
        name, source = (str(item.get(key) or "") for key in ("name", "path"))
    if not name or not source:
        raise ValueError(f'{item!r} is not name=path, nor {{"name": …, "path": …}}')
    return name, source


def words_of(*choices: str) -> Callable[[str], tuple[str, ...]]:
    """Make a parser of a list of `choices`, in any case."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(word.strip().upper() for word in words(text))
        if not found or not set(found) <= set(choices):
            raise ValueError(f"allowed are {', '.join(choices)}, separated by commas")
        return found

    return parse


def dtype(text: str) -> str:
    """One of vLLM's dtype names; LMI's short names are accepted."""
    try:
        return _DTYPES[text.strip().lower()]
    except KeyError:
        advice = " (for int8 use option.quantize)" if text.strip().lower() == "int8" else ""
        allowed = ", ".join(_DTYPES)
        raise ValueError(f"allowed are {allowed}{advice}") from None


def parallel_degree(text: str) -> int | str:
    """A number of GPUs, or `max`; zero and negative numbers mean unset and become 0."""
    if text.strip().lower() == "max":
        return "max"
    try:
        return max(0, whole_number(text))
    except ValueError:
        raise ValueError("a whole number or max is needed") from None


def pipeline_degree(text: str) -> int:
    """A number of stages; zero and negative numbers mean unset and become 0."""
    return max(0, whole_number(text))


def port(text: str) -> int:
    """A TCP port; 0 lets the system choose."""
    try:
        number = whole_number(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:  # noqa: PLR2004 - the largest TCP port
        raise ValueError("a port between 0 and 65535 is needed")
    return number


def address(text: str) -> str:
    """`http://host:port`, `https://host:port`, `host:port` or `unix:/path`."""
    stripped = text.strip()
    if re.fullmatch(r"unix:.+", stripped):
        return stripped
    match = re.fullmatch(r"(https?://)?(\[[0-9a-fA-F:]+\]|[^\s:/]+)(?::(\d{1,5}))?/?", stripped)
    if stripped.isdecimal():  # as a host it would be an IPv4 address, written as one number
        raise ValueError(f"a host is needed, too, such as http://0.0.0.0:{stripped}")
    if match:
        if match[3]:
            port(match[3])
        return stripped.rstrip("/")
    raise ValueError("an address such as http://127.0.0.1:8080 is needed")


def status_code(text: str) -> int:
    """An HTTP status code."""
    number = whole_number(text)
    if not 100 <= number <= 599:  # noqa: PLR2004 - the range HTTP defines
        raise ValueError("an HTTP status code between 100 and 599 is needed")
    return number


def environment_pairs(text: str) -> dict[str, str]:
    """`A=1,B=2` as a mapping."""
    pairs: dict[str, str] = {}
    for part in text.split(","):
        name, separator, value = part.partition("=")
        if not separator or not name.strip():
            raise ValueError("NAME=value pairs separated by commas are needed")
        pairs[name.strip()] = value
    return pairs


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser for one of `choices`, in any case."""
    by_folded = MappingProxyType({choice.lower(): choice for choice in choices})

    def parse(text: str) -> str:
        """The choice `text` names."""
        try:
            return by_folded[text.strip().lower()]
        except KeyError:
            raise ValueError(f"allowed are {', '.join(choices)}") from None

    return parse


def as_vllm(text: str) -> Any:
    """Stands for vLLM's own parser of the row's target, which replaces it."""
    return text
