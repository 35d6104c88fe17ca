"""Parses `vllm serve` flags and `SM_VLLM_*` variables, by the recorded schema of vLLM."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lmi_vllm.config.secrets import is_secret, mask_text
from lmi_vllm.config.variable_names import closest
from lmi_vllm.config.vllm_schema import VllmArgument, coerce, load_release

_REPEATED: Final = ("middleware",)  # flags that may be given several times
SAGEMAKER_PREFIX: Final = "SM_VLLM_"


@dataclass(frozen=True, slots=True)
class Flag:
    """One argument as it was given; `problem` says why it cannot be used."""

    name: str
    text: str
    source: str
    is_engine: bool = False
    problem: str = ""


def read_flags(words: Sequence[str]) -> list[Flag]:
    """Return the flags of a `vllm serve` command line, with or without the program's name."""
    rest = list(words)
    while rest and (rest[0] in ("vllm", "serve") or rest[0].startswith("python")):
        rest.pop(0)
    if rest[:2] == ["-m", "vllm.entrypoints.openai.api_server"]:
        rest = rest[2:]
    flags = []
    if rest and not rest[0].startswith("-"):
        flags.append(Flag("model", rest[0], rest[0]))
        rest = rest[1:]
    flags += [_flag(written, texts) for written, texts in _grouped(rest)]
    return _joined(flags)


def _grouped(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words up to the next one."""
    written = ""
    texts: list[str] = []
    for word in words:
        if word.startswith("--") or (word.startswith("-") and not _is_number(word)):
            if written:
                yield written, texts
            written, separator, text = word.partition("=")
            texts = [text] if separator else []
        else:
            texts.append(word)
    if written:
        yield written, texts


def _is_number(word: str) -> bool:
    """Whether `word` is a number, such as a negative one, rather than a flag."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _flag(written: str, texts: list[str]) -> Flag:
    """Return one parsed flag; `problem` is set where vLLM has none of that name."""
    name, _, key = written.lstrip("-").replace("-", "_").partition(".")
    secret = next(filter(is_secret, key.split(".")), name)
    source = " ".join([written, *(mask_text(secret, text) for text in texts)])
    argument = _find(written, name)
    if argument is None and name.startswith("no_"):
        argument = _find("", name.removeprefix("no_"))
        texts = ["false"]
    if argument is None:
        argument = next((row for row in _all_arguments().values() if written in row.off), None)
        texts = texts if argument is None else ["false"]
    if argument is None:
        known = [f"--{known.replace('_', '-')}" for known in _all_arguments()]
        problem = f"vLLM {load_release().release} has no such flag; {closest(written, known)}"
        return Flag(name, " ".join(texts), source, problem=problem)
    if key:
        texts = [json.dumps(_nested(key.split("."), _json_or_text(" ".join(texts))))]
    return _checked(argument, texts, source)


def _checked(argument: VllmArgument, texts: list[str], source: str) -> Flag:
    """Return the flag; `problem` is set where vLLM could not parse its text."""
    is_engine = argument.name in load_release().passed
    text = _joined_text(argument, texts)
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
            merged = json.loads(earlier.text) | json.loads(flag.text)
            source = f"{earlier.source} {flag.source}"
            flag = Flag(flag.name, json.dumps(merged), source, flag.is_engine)  # noqa: PLW2901
        elif earlier is not None and flag.name in _REPEATED:
            text, source = f"{earlier.text},{flag.text}", f"{earlier.source} {flag.source}"
            flag = Flag(flag.name, text, source, flag.is_engine)  # noqa: PLW2901
        joined[flag.name] = flag
    return list(joined.values())


def _all_arguments() -> Mapping[str, VllmArgument]:
    """Return every argument of `vllm serve` by name, the engine's and the front end's."""
    release = load_release()
    return {**release.front_end, **release.passed}


def _find(written: str, name: str) -> VllmArgument | None:
    """Return the argument of that name or short flag (-tp); None without one."""
    arguments = _all_arguments()
    if name in arguments and not (written.startswith("-") and not written.startswith("--")):
        return arguments[name]
    return next((row for row in arguments.values() if written in row.also), None)


def read_variables(environ: Mapping[str, str]) -> list[Flag]:
    """Return the flags that SageMaker's image makes of `SM_VLLM_<NAME>` variables."""
    flags = []
    for variable, text in environ.items():
        if not variable.startswith(SAGEMAKER_PREFIX):
            continue
        name = variable.removeprefix(SAGEMAKER_PREFIX).lower()
        source = f"{variable}={mask_text(variable, text)}"
        argument = _all_arguments().get(name)
        if argument is None:
            known = [SAGEMAKER_PREFIX + known.upper() for known in _all_arguments()]
            problem = f"vLLM {load_release().release} has no such argument; "
            flags.append(Flag(name, text, source, problem=problem + closest(variable, known)))
        elif argument.is_list and "," not in text and not text.startswith("["):
            flags.append(_checked(argument, text.split(), source))
        else:
            flags.append(_checked(argument, [text] if text else [], source))
    return flags
