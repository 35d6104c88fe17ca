"""The entry point of our images: selects the verb and execs it, without a shell.

The command replaces this process, so it gets the signals and its exit code is the container's.
`health` requests /ping of the server of the same container, for Docker's HEALTHCHECK. A folder, a
URL or a hub id as first word is the model of `serve`. The commands of vLLM's server lead here
(`commands`), and the entry points of TGI's and LMI's images (`launchers`).
"""

import os
import sys

from lmi_vllm.signals import end_on_signals

if __name__ == "__main__":
    end_on_signals(is_serving=len(sys.argv) == 1 or sys.argv[1] == "serve")

import http.client
import re
import socket
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn

from lmi_vllm.cli import (
    REFUSED_VERBS,
    VERBS,
    drop_additions,
    fail,
    open_closed_streams,
    parse,
)
from lmi_vllm.config.listen import ListenAddress, read_address
from lmi_vllm.config.other_servers.vllm_flags import problem_of_word
from lmi_vllm.config.vllm_schema import installed_version, load_release
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.image.commands import (
    PLAIN_PROGRAM,
    as_vllm_command,
    asks_release,
    install_here,
)
from lmi_vllm.features.image.launchers import as_ours

COMPAT_FOLDER: Final = Path("/usr/local/cuda/compat")
DRIVER_VERSION: Final = Path("/proc/driver/nvidia/version")
HELP: Final = ("-h", "--help", "--version")
HEALTH_SECONDS: Final = 4.0
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell would end


def main(arguments: list[str] | None = None) -> None:
    """Exec the command of the container; `serve` without one."""
    open_closed_streams()
    drop_additions()
    words = (sys.argv[1:] if arguments is None else arguments) or ["serve"]
    environ = dict(os.environ)
    if words == ["install-commands"]:
        install_here()
        return
    if words == ["health"]:
        sys.exit(check_health(environ, words_of_server(environ)))
    if "SM_NEO_EXECUTION_CONTEXT" in environ:
        fail(
            "SM_NEO_EXECUTION_CONTEXT: compilation jobs are not supported; serve reads checkpoints"
        )
    if asks_release(words, environ):
        print(installed_version() or load_release().release)
        return
    try:
        words, environ = as_ours(words, environ)
    except ConfigurationError as error:
        fail(error.text)
    words = as_verb(words, environ)
    if Path(words[0]).name == "vllm":
        words[0] = PLAIN_PROGRAM
    if words[0] in (*VERBS, *REFUSED_VERBS, *HELP):
        environ |= compatibility(environ, COMPAT_FOLDER, DRIVER_VERSION)
        words = [sys.executable, "-P", "-m", "lmi_vllm", *words]
    exec_command(words, environ)


def as_verb(words: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return these words with the verb `serve` where they mean it; others as they are."""
    if (serve := as_vllm_command(words, environ)) is not None:
        return serve
    if words[0] not in HELP and (words[0].startswith("-") or names_model(words[0])):
        return ["serve", *words]
    return words


def names_model(word: str) -> bool:
    """Whether the first word is a model and no command: a folder, a URL or a hub id."""
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", word) is not None and not Path(word).exists()
    return Path(word).is_dir() or "://" in word or is_hub_id


def exec_command(words: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process; exit 127 or 126, as a shell does, where that fails."""
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, environ)
    except FileNotFoundError:
        said = problem_of_word(words[0]) or f"{words[0]}: no such command or verb"
        print(f"lmi-vllm: error: {said}", file=sys.stderr)
        sys.exit(NOT_FOUND)
    except OSError as error:
        print(f"lmi-vllm: error: {words[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_EXECUTABLE)


def compatibility(environ: Mapping[str, str], folder: Path, driver: Path) -> Mapping[str, str]:
    """Return LD_LIBRARY_PATH with NVIDIA's compatibility libraries where the driver is older."""
    library = next(folder.glob("libcuda.so.*.*"), None)
    if library is None or not driver.exists():
        return MappingProxyType({})
    text = driver.read_text(encoding="utf-8", errors="replace")
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    ours = library.name.removeprefix("libcuda.so.")
    if match is None or _numbers(match[1]) >= _numbers(ours):
        return MappingProxyType({})
    print(f"driver {match[1]} is older than {ours}: using {folder}", flush=True)
    path = [str(folder), *filter(None, [environ.get("LD_LIBRARY_PATH")])]
    return MappingProxyType({"LD_LIBRARY_PATH": ":".join(path)})


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def words_of_server(environ: Mapping[str, str], first: Path = Path("/proc/1/cmdline")) -> list[str]:
    """Return the words of the server that is the container's first process; `serve` without one.

    Its flags can name another port, socket or scheme than the variables that this process sees.
    With `docker run --init` the first process is an init that has our entry point as its words.
    """
    try:
        words = first.read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:  # no /proc, or another user's process
        return ["serve"]
    for place, module in enumerate(words):
        if words[place - 1 : place] == ["-m"] and module in ("lmi_vllm", __package__):
            found = as_verb(words[place + 1 :] or ["serve"], environ)
            return found if found[0] == "serve" else ["serve"]
    return ["serve"]


def check_health(environ: Mapping[str, str], words: list[str]) -> int:
    """Return 0 when /ping of the server with these words is 200; else print why and return 1."""
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)  # as in `main` of the command line
    from lmi_vllm.assembly import configuration
    from lmi_vllm.commands.explain import command_line_of

    made = configuration()
    settings = made.load(environ, command_line_of(parse(words), made.options))
    address = read_address(settings.server.inference_address)
    try:
        connection = _connect(address)
        connection.request("GET", "/ping")
        answer = connection.getresponse()
        text = answer.read(1000).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        print(f"{address.url()}/ping: {error}")
        return 1
    print(text)
    return 0 if answer.status == HTTPStatus.OK else 1


def _connect(address: ListenAddress) -> http.client.HTTPConnection:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    if address.is_tls:  # over loopback, where the certificate's name cannot match
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(
            host, address.port, timeout=HEALTH_SECONDS, context=context
        )
    connection = http.client.HTTPConnection(host, address.port, timeout=HEALTH_SECONDS)
    if address.path:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(HEALTH_SECONDS)
        connection.sock.connect(address.path)
    return connection


if __name__ == "__main__":
    main()
