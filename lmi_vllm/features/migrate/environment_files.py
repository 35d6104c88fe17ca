"""Reads variables from what people have them in: files of variables, JSON, YAML, commands, code.

A file is read as the first of these forms that fits. Values stay text as they were written. None is
a value that the file does not hold: of a secret, or of an expression.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import yaml

from lmi_vllm.config.other_servers.tgi_variables import TGI_VARIABLES
from lmi_vllm.config.vllm_schema import vllm_argument_names
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.migrate.container_commands import commands_of
from lmi_vllm.features.migrate.python_variables import Variables, from_notebook, from_python

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_MAPS: Final = ("Environment", "environment", "env", "Env", "EnvironmentVariables")
_MAPS_OF_KINDS: Final = {"ConfigMap": ("data",), "Secret": ("data", "stringData")}  # Kubernetes
_BOMS: Final = ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8-sig"))


class _Loader(yaml.BaseLoader):  # type: ignore[misc]
    """Makes no objects, and leaves every scalar the text that was written.

    The value of a scalar with a tag (`!Ref`, `!Sub` of CloudFormation) is not in the file.
    """


def _of_tag(loader: _Loader, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return (
        loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else None
    )


_Loader.add_multi_constructor("!", _of_tag)
# The word behind `vllm serve`, also in a list of words.
_SERVED_MODEL: Final = re.compile(r"""\bvllm\b[^\n]*?\bserve["',\s]+([\w./][^\s"',\]]*)""")
_FLAG: Final = re.compile(r"(?<![\w-])--[a-z][\w-]+")
_BLOCK: Final = re.compile(r"\benvironment\w*\s*[:=]\s*\{|\benv\s*[:=]\s*\{", re.IGNORECASE)
_ENTRY: Final = re.compile(
    r"""(?:^|[{,])\s*["']?([A-Z][A-Z0-9_]*)["']?\s*[:=]\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^,\n}]+)""",
    re.MULTILINE,
)
_ASSIGNMENT: Final = re.compile(r"[A-Z][A-Za-z0-9_.]*=")
_LINE: Final = re.compile(r"(export )?[A-Z][A-Za-z0-9_.]*=")


def read_environment(path: str) -> Variables:
    """Return the variables of a file; none where it has another form.

    Raises:
        ConfigurationError: it cannot be read.
    """
    text = _read(path)
    found = next((found for form in _FORMS if (found := form(text))), {})
    # `serve` drops line breaks at the end of a variable, too.
    return {name: value and value.rstrip("\r\n") for name, value in found.items()}


def commands_in(path: str) -> list[list[str]]:
    """Return the words with which the containers of a file start vLLM's or TGI's server."""
    text = _read(path)
    return commands_of(_documents(text), text)


def flags_in(path: str) -> list[str]:
    """Return the model and flags of vLLM's and TGI's servers in a file, outside comments.

    They are arguments of a container's command, which are not read as variables.
    """
    lines = [line for line in _read(path).splitlines() if not line.lstrip().startswith("#")]
    words = dict.fromkeys(_FLAG.findall("\n".join(lines)))
    known = {f"--{name.replace('_', '-')}" for name in vllm_argument_names()}
    known |= {f"--{name.lower().replace('_', '-')}" for name in TGI_VARIABLES}
    models = _SERVED_MODEL.findall("\n".join(lines))
    return [*models, *(word for word in words if word.replace("_", "-") in known)]


def _read(path: str) -> str:
    try:
        content = Path(path).read_bytes()
        encoding = next((name for bom, name in _BOMS if content.startswith(bom)), "utf-8")
        text = content.decode(encoding)
    except OSError as error:
        raise ConfigurationError([f"{path} cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        reason = f"{path} is not text in UTF-8 or UTF-16: {error.reason}"
        raise ConfigurationError([reason]) from error
    return text


def _from_document(text: str) -> Variables:
    """Variables of JSON or YAML: SageMaker's requests, Kubernetes, Compose, `docker inspect`."""
    found: Variables = {}
    for document in _documents(text):
        if isinstance(document, dict) and _is_plain(document):
            found |= document
        else:
            for part in _parts(document):
                found |= part
    return found


def _documents(text: str) -> list[Any]:
    try:
        return [*yaml.load_all(text, Loader=_Loader)]
    except (yaml.YAMLError, RecursionError):
        return []


def _is_plain(document: Mapping[Any, Any]) -> bool:
    """Whether a document is names and values alone."""
    return bool(document) and all(
        isinstance(name, str) and _NAME.fullmatch(name) and isinstance(value, str)
        for name, value in document.items()
    )


def _parts(document: Any) -> Iterator[Variables]:
    """Yield the variables of every environment in a document."""
    if isinstance(document, list):
        if (found := _of_list(document)) is not None:
            yield found
            return
        for item in document:
            yield from _parts(item)
    elif isinstance(document, dict):
        maps = _MAPS_OF_KINDS.get(str(document.get("kind")), _MAPS)
        for key, value in document.items():
            if key in maps and isinstance(value, dict):
                # A secret's value is in base64, and not to be shown.
                is_secret = document.get("kind") == "Secret"
                yield {
                    str(name): None if is_secret else _as_text(text) for name, text in value.items()
                }
            else:
                yield from _parts(value)


def _of_list(items: list[Any]) -> Variables | None:
    """Variables of a list: `name` and `value` (Kubernetes, ECS), or NAME=value (Docker)."""
    if not items:
        return None
    if all(isinstance(item, dict) and "name" in item for item in items):
        if not any({"value", "valueFrom"} & {*item} for item in items):
            return None  # containers, volumes
        return {str(item["name"]): _as_text(item.get("value")) for item in items}
    if all(isinstance(item, str) and _LINE.match(item) for item in items):
        pairs = (item.partition("=") for item in items)
        return {name: value for name, _, value in pairs}
    return None


def _as_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _from_command(text: str) -> Variables:
    """Variables of `docker run -e NAME=value --env NAME=value`."""
    if not re.search(r"(^|\s)(-e|--env)[\s=]", text):
        return {}
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return {}
    found: Variables = {}
    for place, word in enumerate(words):
        pair = word.removeprefix("--env=") if word.startswith("--env=") else ""
        if word in ("-e", "--env") and place + 1 < len(words):
            pair = words[place + 1]
        name, has_value, value = pair.partition("=")
        if _NAME.fullmatch(name):
            found[name] = value if has_value else None
    return found


def _from_dockerfile(text: str) -> Variables:
    """Variables of `ENV NAME=value …` and of the older `ENV NAME value`."""
    found: Variables = {}
    for line in text.replace("\\\n", " ").split("\n"):
        match = re.match(r"\s*ENV\s+(.*)", line)
        if match is None:
            continue
        try:
            words = shlex.split(match[1])
        except ValueError:
            continue
        if words and "=" not in words[0]:
            found[words[0]] = " ".join(words[1:])
        else:
            found |= {name: value for name, _, value in (word.partition("=") for word in words)}
    return found


def _from_blocks(text: str) -> Variables:
    """Variables of `environment = {` in Terraform, and of `Environment: {` in JavaScript."""
    if not _BLOCK.search(text):
        return {}
    return {name: _literal(value.strip()) for name, value in _ENTRY.findall(text)}


def _literal(text: str) -> str | None:
    """The text of a literal of code; None for an expression, also inside of a text."""
    if text[:1] in ("'", '"'):
        return None if "${" in text else re.sub(r"\\(.)", r"\1", text[1:-1])
    match = re.fullmatch(r"(true|false|[\d.]+)(\s*(#|//).*)?", text)
    return match[1] if match else None


def _from_plain_lines(text: str) -> Variables:
    """Variables of a file in which every line is one."""
    lines = [line.strip() for line in text.split("\n")]
    given = [line for line in lines if line and not line.startswith("#")]
    is_plain = all(map(_LINE.match, given)) and not commands_of([], text)  # `A=b vllm serve …`
    return _from_lines(text) if is_plain else {}


def _from_unit(text: str) -> Variables:
    """Variables of `Environment=NAME=value "NAME=value"` in a unit of systemd."""
    if not re.search(r"^\[Service\]", text, re.MULTILINE):
        return {}
    given = re.findall(r"^\s*Environment=(.*)", text.replace("\\\n", " "), re.MULTILINE)
    return _assigned(word for line in given for word in _shell_words(line))


def _from_script(text: str) -> Variables:
    """Variables of a shell's script: `export NAME=value`, and those before a command."""
    found: Variables = {}
    for line in text.replace("\\\n", " ").split("\n"):
        words = _shell_words(line)
        words = words[1:] if words[:1] == ["export"] else words
        found |= _assigned(takewhile(_ASSIGNMENT.match, words))
    return found


def _shell_words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return []


def _assigned(words: Iterable[str]) -> Variables:
    pairs = (word.partition("=") for word in words)
    return {name: None if value[:1] == "(" else value for name, _, value in pairs}  # an array


def _from_lines(text: str) -> Variables:
    """Variables of NAME=value lines, as of `docker --env-file`."""
    lines = (line.strip().removeprefix("export ") for line in text.split("\n"))
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {
        name.strip(): _unquoted(value)
        for name, has_value, value in pairs
        if has_value and _NAME.fullmatch(name.strip())
    }


def _unquoted(value: str) -> str:
    """Return `value` without shell quotes around it."""
    stripped = value.strip()
    if stripped[:1] in ("'", '"') and stripped[-1:] == stripped[:1]:
        return stripped[1:-1]
    return stripped


_FORMS: Final[tuple[Callable[[str], Variables], ...]] = (
    _from_plain_lines,
    from_notebook,
    _from_unit,
    _from_document,
    _from_command,
    _from_dockerfile,
    from_python,
    _from_blocks,
    _from_script,
)
