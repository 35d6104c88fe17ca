"""Parses `vllm serve` flags and `SM_VLLM_*` variables, by the recorded schema of vLLM."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.config.other_servers.one_word import SEVERAL, several_in_one, start_of
from lmi_vllm.config.other_servers.tgi_variables import TGI_VARIABLES
from lmi_vllm.config.secrets import is_secret, mask_text
from lmi_vllm.config.variable_names import SAGEMAKER_PREFIX, closest
from lmi_vllm.config.vllm_schema import VllmArgument, coerce, load_release

_REPEATED: Final = ("middleware",)  # flags that may be given several times
_SWITCHES: Final = ("bool", "flag")  # kinds without a value
_WITHOUT_VALUE: Final = (*_SWITCHES, "bool_or_text")
_SWITCH_WORDS: Final = ("true", "false")
# Of our own commands, which may be misspelt, too.
OWN_FLAGS: Final = (
    "--model-store", "--models", "--config-file", "--demo", "--strict", "--vllm-defaults",
    "--offline", "--gpus", "--format", "--engine", "--device-memory", "--all",
)  # fmt: skip
# Flags of KServe's Hugging Face server, whose names are none of vLLM's.
_OF_KSERVE: Final = MappingProxyType(
    {
        "model_name": "write --served-model-name",
        "model_dir": "write --model",
        "model_revision": "write --revision",
        "max_length": "write --max-model-len",
        "http_port": "write --port",
        "backend": "leave it out: vLLM is the engine",
    }
)
_LEVEL: Final = re.compile(r"-O=?(\w+)")


@dataclass(frozen=True, slots=True)
class Flag:
    """One argument as it was given.

    `source` is what messages quote, `written` the flag or variable alone. `problem` says why it
    cannot be used, `is_unknown` that vLLM has no such argument.
    """

    name: str
    text: str
    source: str
    is_engine: bool = False
    problem: str = ""
    written: str = ""
    is_unknown: bool = False


def read_flags(words: Sequence[str]) -> list[Flag]:
    """Return the flags of a `vllm serve` command line, with or without the program's name."""
    rest = list(words)
    while rest and (rest[0] in ("vllm", "serve") or rest[0].startswith("python")):
        rest.pop(0)
    if rest[:2] == ["-m", "vllm.entrypoints.openai.api_server"]:
        rest = rest[2:]
    of_files: list[Flag] = []
    flags: list[Flag] = []
    positional: list[str] = []
    for written, texts in _grouped(rest):
        if not written:
            positional += texts
        elif several_in_one(written):
            flags.append(_several(written))
        elif written == "--config" and of_files:
            problem = "a second file is not read, nor by vLLM: give one"
            of_files.append(Flag("config", "", f"--config {' '.join(texts)}", problem=problem))
        elif written == "--config":
            of_files += _of_file(" ".join(texts))
        else:
            flags.append(_flag(written, texts))
    return _joined([*of_files, *_positional(positional, flags), *flags])


def _positional(words: Sequence[str], flags: Sequence[Flag]) -> Iterator[Flag]:
    """The model, which is the one word that belongs to no flag."""
    named = next((flag for flag in flags if flag.name == "model"), None)
    for number, word in enumerate(words):
        if several_in_one(word):
            yield _several(word)
        elif number == 0 and (named is None or named.text == word):
            yield Flag("model", word, word, written="MODEL")
        elif number == 0 and named is not None:
            problem = f"{named.source} names another model: give one"
            yield Flag("word 0", word, word, problem=problem, written=word)
        else:
            problem = f"only one word without a flag is read, the model ({words[0]})"
            yield Flag(f"word {number}", word, word, problem=problem, written=word)


def problem_of_word(word: str) -> str:
    """Return the error about a word that is a whole command line; "" for another word."""
    return f"{start_of(word)}: {SEVERAL}" if several_in_one(word) else ""


def _several(word: str) -> Flag:
    start = start_of(word)
    return Flag(word, "", start, problem=SEVERAL, written=start)


def _of_file(path: str) -> list[Flag]:
    """Return the flags of a YAML file, as vLLM's `--config` reads it."""
    import yaml  # noqa: PLC0415 (where a file is given only)

    source = f"--config {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        return [Flag("config", path, source, problem=f"cannot be read: {reason}", written=source)]
    if not isinstance(content, dict):
        problem = "the file has no mapping of flags to values"
        return [Flag("config", path, source, problem=problem, written=source)]
    keys = Counter(str(key.value).replace("_", "-") for key, _ in node.value)
    twice = [
        Flag(name, "", source, problem=f"{name} stands there twice: give it once", written=source)
        for name, count in keys.items()
        if count > 1
    ]
    return twice + [
        replace(flag, written=f"{flag.written} of {path}", source=f"{flag.source} of {path}")
        for name, value in content.items()
        if (flag := _of_entry(str(name), value)) is not None
    ]


def _of_entry(name: str, value: object) -> Flag | None:
    """Return one entry of the file; None for a switch without a negative form that is off."""
    written = f"--{name.replace('_', '-')}"
    if value is False:  # vLLM makes --no-… of it
        argument = _find(written, _name_of(written)[0])
        is_bare = argument is not None and argument.kind == "flag"
        return None if is_bare else _flag(f"--no-{written.removeprefix('--')}", [])
    texts: list[str] = []
    if isinstance(value, list):
        texts = [one if isinstance(one, str) else json.dumps(one) for one in value]
    elif isinstance(value, Mapping):
        texts = [json.dumps(value)]
    elif value is not True:
        texts = [str(value)]
    return _flag(written, texts)


def _grouped(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with its values, and ("", words) where they belong to no flag."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not is_flag(word):
            yield "", [word]
            continue
        written, separator, text = word.partition("=")
        if several_in_one(word):
            yield word, []
        elif level := _LEVEL.fullmatch(word):
            yield "--optimization-level", [level[1]]
        elif word == "-O" and rest:
            yield "--optimization-level", [rest.pop(0)]
        elif separator:
            yield written, [text]
        else:
            following = next((i for i, one in enumerate(rest) if is_flag(one)), len(rest))
            count = _values(written, rest[:following])
            yield written, rest[:count]
            del rest[:count]


def _values(written: str, following: Sequence[str]) -> int:
    """Return how many of the words behind a flag are its values."""
    name, _, key = _name_of(written)
    argument = _find(written, name)
    if key:
        return min(1, len(following))
    if argument is None:
        off = name.startswith("no_") or any(written in row.off for row in _all_arguments().values())
        return 0 if off else len(following)  # of an unknown flag: its message quotes them
    if argument.kind in _SWITCHES:
        return int(bool(following) and following[0].lower() in _SWITCH_WORDS)
    return len(following) if argument.is_list else min(1, len(following))


def is_flag(word: str) -> bool:
    """Whether `word` is a flag rather than a value, such as a negative number."""
    return word.startswith("--") or (
        word.startswith("-") and len(word) > 1 and not _is_number(word)
    )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _name_of(written: str) -> tuple[str, str, str]:
    """Return the argument's name, and what follows its first dot."""
    return written.lstrip("-").replace("-", "_").partition(".")


def _flag(written: str, texts: list[str]) -> Flag:
    """Return one parsed flag; `problem` is set where vLLM has none of that name."""
    name, _, key = _name_of(written)
    secret = next(filter(is_secret, key.split(".")), name)
    source = " ".join([written, *(mask_text(secret, text) for text in texts)])
    argument = _find(written.partition(".")[0], name)
    if argument is None and name.startswith("no_"):
        argument = _find("", name.removeprefix("no_"))
        texts = ["false"]
    if argument is None:
        argument = next((row for row in _all_arguments().values() if written in row.off), None)
        texts = texts if argument is None else ["false"]
    if argument is None:
        known = [f"--{known.replace('_', '-')}" for known in _all_arguments()]
        near = closest(written, [*known, *OWN_FLAGS])
        problem = f"vLLM {load_release().release} has no such flag; {near}"
        if name.upper() in TGI_VARIABLES:
            problem = "it is a flag of TGI's launcher: lmi-vllm migrate --from tgi -- FLAGS"
        if name in _OF_KSERVE:
            problem = f"vLLM {load_release().release} has no such flag; {_OF_KSERVE[name]}"
        # Its value is not shown: what a misspelt flag holds is not known.
        is_unknown = name not in _OF_KSERVE
        return Flag(name, "", written, problem=problem, written=written, is_unknown=is_unknown)
    if key:
        text = " ".join(texts)
        value = text.split(",") if key.endswith("+") else _json_or_text(text)
        texts = [json.dumps(_nested(key.removesuffix("+").split("."), value))]
    return replace(_checked(argument, texts, source), written=written)


def _checked(argument: VllmArgument, texts: list[str], source: str) -> Flag:
    """Return the flag; `problem` is set where vLLM could not parse its text."""
    is_engine = argument.name in load_release().passed
    text = _joined_text(argument, texts)
    if not text and argument.kind not in _WITHOUT_VALUE:
        return Flag(argument.name, text, source, is_engine, "a value is needed")
    try:
        coerce(argument, text)
    except ValueError as error:
        return Flag(argument.name, text, source, is_engine, f"the value cannot be used: {error}")
    return Flag(argument.name, text, source, is_engine)


def _joined_text(argument: VllmArgument, texts: list[str]) -> str:
    """Return the texts after a flag as one: a bare switch is `true`, several words are a list."""
    if not texts:
        return "true" if argument.kind in ("bool", "flag", "bool_or_text") else ""
    if argument.is_list and len(texts) > 1:
        return json.dumps(texts)
    return " ".join(texts)


def _json_or_text(text: str) -> object:
    """Return the JSON value of `text`, else the text."""
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


def _nested(keys: Sequence[str], value: object) -> object:
    """Return `value` nested below `keys`: a.b = 1 is {"a": {"b": 1}}."""
    for key in reversed(keys):
        value = {key: value}
    return value


def _joined(flags: list[Flag]) -> list[Flag]:
    """Return the flags with the parts of one JSON argument (--x.a 1 --x.b 2) merged."""
    joined: dict[str, Flag] = {}
    for flag in flags:
        earlier = joined.get(flag.name)
        if earlier is not None and flag.text.startswith("{") and earlier.text.startswith("{"):
            merged = json.dumps(_merged(json.loads(earlier.text), json.loads(flag.text)))
            source = f"{earlier.source} {flag.source}"
            flag = replace(flag, text=merged, source=source)  # noqa: PLW2901
        elif earlier is not None and flag.name in _REPEATED:
            text, source = f"{earlier.text},{flag.text}", f"{earlier.source} {flag.source}"
            flag = replace(flag, text=text, source=source)  # noqa: PLW2901
        joined[flag.name] = flag
    return list(joined.values())


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings in one, the second's values before the first's."""
    merged = dict(first)
    for key, value in second.items():
        earlier = merged.get(key)
        both = isinstance(earlier, dict) and isinstance(value, dict)
        merged[key] = _merged(earlier or {}, value) if both else value
    return merged


def _all_arguments() -> Mapping[str, VllmArgument]:
    """Return every argument of `vllm serve` by name, the engine's and the front end's."""
    release = load_release()
    return {**release.front_end, **release.passed}


def _find(written: str, name: str) -> VllmArgument | None:
    """Return the argument of that name or short flag (-tp); None without one."""
    arguments = _all_arguments()
    if name in arguments and not (written.startswith("-") and not written.startswith("--")):
        return arguments[name]
    short = next((row for row in arguments.values() if written in row.also), None)
    if short is not None or not written.startswith("--"):
        return short
    longer = _with_prefix(written)
    return longer[0] if len(longer) == 1 else None  # argparse takes a prefix of one flag


def _with_prefix(written: str) -> list[VllmArgument]:
    """Return the arguments that a shortened flag may mean, by any of their flags."""
    prefix = written.replace("_", "-")
    return [
        row
        for name, row in _all_arguments().items()
        if any(flag.startswith(prefix) for flag in (f"--{name.replace('_', '-')}", *row.also))
    ]


def read_variables(environ: Mapping[str, str]) -> list[Flag]:
    """Return the flags that SageMaker's image makes of `SM_VLLM_<NAME>` variables."""
    flags = []
    for variable, text in environ.items():
        if not variable.startswith(SAGEMAKER_PREFIX):
            continue
        name = variable.removeprefix(SAGEMAKER_PREFIX).lower()
        source = f"{variable}={mask_text(variable, text)}"
        if name == "config":
            of_file = _of_file(text)
            flags += [replace(flag, written=f"{flag.written} ({variable})") for flag in of_file]
            continue
        argument = _all_arguments().get(name)
        negated = _all_arguments().get(name.removeprefix("no_"))
        if argument is None and name.startswith("no_") and negated is not None:
            flag = _checked(negated, ["false"], source)
        elif argument is None:
            known = [SAGEMAKER_PREFIX + known.upper() for known in _all_arguments()]
            problem = f"vLLM {load_release().release} has no such argument; "
            meant = _OF_KSERVE.get(name, "").partition("write --")[2]
            meant = f"write {SAGEMAKER_PREFIX}{meant.replace('-', '_').upper()}" if meant else ""
            problem += meant or closest(variable, known)
            flag = Flag(name, "", variable, problem=problem, is_unknown=True)
        elif not text and argument.kind not in _WITHOUT_VALUE:
            continue  # an empty variable is an unset one
        elif argument.is_list and "," not in text and not text.startswith("["):
            flag = _checked(argument, text.split(), source)
        else:
            flag = _checked(argument, [text] if text else [], source)
        flags.append(replace(flag, written=variable))
    return flags
