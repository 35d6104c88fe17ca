"""The words that start a server: of `command` and `args`, `docker run`, a script or a unit."""

import re
import shlex
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import yaml

from lmi_vllm.config.other_servers.tgi_variables import LAUNCHER

_API_SERVER: Final = "vllm.entrypoints.openai.api_server"
_KSERVES: Final = "huggingfaceserver"  # the module of KServe's runtime, whose engine is vLLM
_OF_KSERVE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--model_name": "--served-model-name",
        "--model_id": "--model",
        "--model_dir": "--model",
        "--model_revision": "--revision",
        "--max_length": "--max-model-len",
        "--http_port": "--port",
    }
)
_LEFT_OUT: Final = ("--backend", "--grpc_port")
# In the order in which they stand in the command: Kubernetes, SageMaker, Docker, Compose, ECS.
_WORDS: Final = (
    ("command", "args"),
    ("ContainerEntrypoint", "ContainerArguments"),
    ("Entrypoint", "Cmd"),
    ("entrypoint", "command"),
    ("entryPoint", "command"),
)
_TO_IMAGE: Final = re.compile(r"\b(?:docker|podman|nerdctl)\s+run\s")
# The flags of `docker run` that take no value; every other one does.
_SWITCHES: Final = re.compile(
    r"-[ditPq]+|--(detach|interactive|tty|init|rm|privileged|read-only|quiet|publish-all|"
    r"no-healthcheck|oom-kill-disable|sig-proxy)"
)
_OF_DOCKERFILE: Final = re.compile(r"^\s*(ENTRYPOINT|CMD)\s+(.+)$", re.MULTILINE)
_ENDS: Final = frozenset({";", "&&", "||", "|", "&", ">", "2>&1"})
_REDIRECTION: Final = re.compile(r"(\d|&)?[<>]")
# The last two groups are the default of Compose and of a shell: ${NAME:-default}.
_REFERENCE: Final = re.compile(r"\$\((\w+)\)|\$\{(\w+)\}|\$(\w+)|\$\{(\w+):?-([^}]*)\}")
_UNIT_COMMAND: Final = re.compile(r"^\s*ExecStart=[-@:+!|]*")


def commands_of(documents: list[Any], text: str) -> list[list[str]]:
    """Return what follows the server's name in each command of YAML, JSON or `docker run`.

    TGI's launcher stays the first word. Commands of other programs are left out.
    """
    words = (
        [*_of_documents(documents)]
        or [*_of_docker_run(text)]
        or [*filter(None, [_of_dockerfile(text)])]
        or [*_of_script(text)]
    )
    found = [server for one in words if (server := _server_words(one))]
    return [one for place, one in enumerate(found) if one not in found[:place]]


def with_values(
    words: list[str], variables: Mapping[str, str | None]
) -> tuple[list[str], list[str]]:
    """Put the variables of the file into the words; returns those whose value is not in it, too."""
    missing: list[str] = []

    def value(match: re.Match[str]) -> str:
        found = variables.get(match[1] or match[2] or match[3] or match[4])
        found = match[5] if found is None else found
        if found is None:
            missing.append(match[0])
        return match[0] if found is None else found

    return [_REFERENCE.sub(value, word) for word in words], missing


def _of_documents(node: Any) -> Iterator[list[str]]:
    if isinstance(node, list):
        for item in node:
            yield from _of_documents(item)
    elif isinstance(node, dict):
        for names in _WORDS:
            if words := [word for name in names for word in _words(node.get(name))]:
                yield words
                break
        for value in node.values():
            yield from _of_documents(value)


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return _split(value)
    is_words = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return value if is_words else []


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return []


def _of_docker_run(text: str) -> Iterator[list[str]]:
    for match in _TO_IMAGE.finditer(text):
        words = iter(_split(text[match.end() :]))
        for word in words:
            if not word.startswith("-"):  # the image
                yield [*words]
                break
            if "=" not in word and not _SWITCHES.fullmatch(word):
                next(words, None)


def _of_script(text: str) -> Iterator[list[str]]:
    """The lines of a shell's script or of a unit of systemd that start a server by its name."""
    for line in text.replace("\\\n", " ").split("\n"):
        words = _split(_UNIT_COMMAND.sub("", line))
        if (server := _named_server(words)) is not None:
            yield [*(["vllm", "serve"] if server[:1] != [LAUNCHER] else []), *server]


def _of_dockerfile(text: str) -> list[str]:
    """The last ENTRYPOINT, and the last CMD, each a list in JSON or a line of a shell."""
    parts: dict[str, list[str]] = {"ENTRYPOINT": [], "CMD": []}
    for name, line in _OF_DOCKERFILE.findall(text.replace("\\\n", " ")):
        is_list = line.startswith("[")
        parts[name] = _words(yaml.safe_load(line)) if is_list else _split(line)
    return [*parts["ENTRYPOINT"], *parts["CMD"]]


def _server_words(words: list[str]) -> list[str]:
    """Return the model and flags of a command of vLLM's or TGI's server; none of another's."""
    if len(words) > 1 and "-c" in words[:-1] and " " in words[-1]:  # a shell's script
        words = _split(words[-1])
    if (named := _named_server(words)) is not None:
        return named
    names = {word.partition("=")[0] for word in words}
    if _KSERVES in words or names & {"--model_name", "--model_id", "--model_dir"}:
        return _as_vllms(words)
    # The image's own entry point has the server's name.
    if "--model-id" in names:
        return [LAUNCHER, *words]
    is_vllms = "--model" in names or (words and "/" in words[0] and words[0][:1] != "-")
    return words if is_vllms and any(name.startswith("--") for name in names) else []


def _as_vllms(words: list[str]) -> list[str]:
    """Return the arguments of KServe's runtime as vLLM's, whose other names are the same."""
    found: list[str] = []
    rest = iter(words[words.index(_KSERVES) + 1 :] if _KSERVES in words else words)
    for word in rest:
        name, is_one_word, value = word.partition("=")
        if name in _LEFT_OUT:
            if not is_one_word:
                next(rest, None)
            continue
        found.append(_OF_KSERVE.get(name, name) + is_one_word + value)
    return found


def _named_server(words: list[str]) -> list[str] | None:
    """Return what follows the name of a server; None where no word is one."""
    for place, word in enumerate(words):
        name, following = word.rpartition("/")[2], words[place + 1 : place + 2]
        if (name == "vllm" and following == ["serve"]) or (
            word == "-m" and _API_SERVER in following
        ):
            return _until_the_end(words[place + 2 :])
        if name == LAUNCHER:
            return _until_the_end(words[place:])
    return None


def _until_the_end(words: list[str]) -> list[str]:
    ends = (at for at, word in enumerate(words) if word in _ENDS or _REDIRECTION.match(word))
    return words[: next(ends, len(words))]
