"""The command line: finds the verb, passes it the environment, turns its result into an exit code.

A verb is imported when it is chosen, so `explain` and `--help` load neither aiohttp nor vLLM.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from lmi_vllm._version import __version__
from lmi_vllm.errors import LmiError

if TYPE_CHECKING:
    from lmi_vllm.server.parts import Assembled
    from lmi_vllm.translate.configuration import Configuration

EXIT_FAILURE: Final = 1
EXIT_INTERRUPTED: Final = 130
_NOT_FOR_ALL: Final = 0o002  # other users of the machine write none of our files
_STDOUT: Final = 1
_STDERR: Final = 2


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb; its module has `add_arguments` and `run`."""

    summary: str
    module: str
    examples: tuple[str, ...]


_WHERE_OPTIONS_ARE_SET: Final = (
    "Options are set by flags, serving.properties (option.max_model_len=8k) or variables\n"
    "(OPTION_MAX_MODEL_LEN=8k). lmi-vllm explain shows where each value came from."
)
VERBS: Final[Mapping[str, Verb]] = MappingProxyType(
    {
        "serve": Verb(
            "start the server",
            "lmi_vllm.commands.serve",
            (
                "lmi-vllm serve --demo",
                "lmi-vllm serve acme/assistant-8b --max-model-len 8192 --host 0.0.0.0",
                "HF_MODEL_ID=s3://my-bucket/assistant-8b/ lmi-vllm serve",
                "lmi-vllm serve --model-store DIR      # a folder with a serving.properties",
            ),
        ),
        "explain": Verb(
            "show every option, where its value came from and what it becomes",
            "lmi_vllm.commands.explain",
            (
                "lmi-vllm explain --model-store DIR --gpus 4",
                "OPTION_QUANTIZE=fp8 lmi-vllm explain acme/assistant-8b --all",
            ),
        ),
        "bench": Verb(
            "put load on an endpoint and report the figures",
            "lmi_vllm.features.bench.command",
            (
                "lmi-vllm bench http://localhost:8080 -n 100 -c 8",
                "lmi-vllm bench http://localhost:8080 --rate 5 --duration 60 --json figures.json",
            ),
        ),
        "fetch": Verb(
            "download a model",
            "lmi_vllm.features.fetch.command",
            ("lmi-vllm fetch acme/assistant-8b --to /models/assistant-8b",),
        ),
        "migrate": Verb(
            "turn an LMI, TGI or vllm serve configuration into ours",
            "lmi_vllm.features.migrate.command",
            (
                "lmi-vllm migrate serving.properties",
                "lmi-vllm migrate deployment.yaml --format environment",
                "lmi-vllm migrate -- acme/assistant-8b --max-model-len 8192    # of vllm serve",
            ),
        ),
        "validate": Verb(
            "explain, and check the settings against the model",
            "lmi_vllm.features.validate.command",
            (
                "lmi-vllm validate acme/assistant-8b --gpus 1 --device-memory 24",
                "lmi-vllm validate --config DIR --device-memory 24    # without the hub",
            ),
        ),
        "completion": Verb(
            "print a script that completes verbs and flags in bash or zsh",
            "lmi_vllm.commands.completion",
            ('eval "$(lmi-vllm completion bash)"    # also as a line of ~/.bashrc',),
        ),
    }
)
REFUSED_VERBS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "partition": "offline model conversion is not supported; serve reads checkpoints as is",
        "train": "training is not supported; this is an inference server",
    }
)


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and exit with its code."""
    open_closed_streams()
    drop_additions()
    os.umask(os.umask(0o022) | _NOT_FOR_ALL)  # of everything that is fetched, unpacked and kept
    # Deployments set it for vLLM's own server: prometheus_client would count in what others left.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in REFUSED_VERBS:
        fail(f"{words[0]}: {REFUSED_VERBS[words[0]]}")
    try:
        if words and words[0] == "serve":
            _set_variables(words[1:])
        parsed = parse(words)
        run = importlib.import_module(VERBS[parsed.verb].module).run
        if parsed.verb == "completion":
            parsed.parsers = {name: verb_parser(name) for name in VERBS}
        code = run(parsed, MappingProxyType(dict(os.environ)), _made_for(parsed.verb))
    except LmiError as error:
        fail(error.text)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code)


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed (`>&-`).

    Else Python has no stream there to print to, and a socket gets its number and what is printed.
    """
    while (lowest_free := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(lowest_free, True)
    os.close(lowest_free)
    sys.stdout = sys.stdout or os.fdopen(_STDOUT, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(_STDERR, "w", 1, closefd=False)


def drop_additions() -> None:
    """Drop what Kubernetes adds: a line break at the end of a Secret, and a Service's VLLM_PORT.

    A Secret made of a file has one. A Service named vllm makes a URL of vLLM's own variable, which
    ends its engine.
    """
    if os.environ.get("VLLM_PORT", "").startswith("tcp://"):
        del os.environ["VLLM_PORT"]
    for name, text in os.environ.items():
        if text.endswith(("\n", "\r")):
            os.environ[name] = text.rstrip("\r\n")


def parse(words: list[str]) -> argparse.Namespace:
    """Return the parsed arguments; only the chosen verb's module is imported."""
    parser = argparse.ArgumentParser(prog="lmi-vllm", description="LMI-compatible server on vLLM.")
    parser.add_argument("--version", action="version", version=f"lmi-vllm {__version__}")
    named = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    chosen = next((word for word in words if word in VERBS), None)
    vllm_words: list[str] | None = None
    for name, verb in VERBS.items():
        own = named.add_parser(name, help=verb.summary, **_shown(verb))
        if name == chosen:
            importlib.import_module(verb.module).add_arguments(own, _made_for(name))
            if own.get_default("vllm_words") is not None:
                words, vllm_words = _split_words(words, own)
    parsed = parser.parse_args(words or ["--help"])
    if vllm_words is not None:
        parsed.vllm_words = vllm_words
    return parsed


def verb_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one verb, with all its flags."""
    verb = VERBS[name]
    parser = argparse.ArgumentParser(prog=f"lmi-vllm {name}", **_shown(verb))
    importlib.import_module(verb.module).add_arguments(parser, _made_for(name))
    return parser


def _shown(verb: Verb) -> dict[str, Any]:
    """Return what `--help` says of a verb around its flags."""
    examples = "\n".join(f"  {line}" for line in verb.examples)
    return {
        "description": f"{verb.summary.capitalize()}.",
        "epilog": f"examples:\n{examples}\n\n{_WHERE_OPTIONS_ARE_SET}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def _split_words(words: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Return the words for our parser, and those for vLLM's: flags that ours does not have."""
    from lmi_vllm.assembly import words_of_both

    verb, *rest = words
    ours, others = words_of_both(rest, parser)
    return [verb, *ours], others


def _made_for(verb: str) -> "Configuration | Assembled":
    """Return what the verb gets; imported late, for `--help` to be fast."""
    from lmi_vllm.assembly import assembled, configuration

    return assembled() if verb == "serve" else configuration()


def _set_variables(words: list[str]) -> None:
    """Set environment variables of features before a library is imported that reads them."""
    from lmi_vllm.assembly import variables_to_serve

    os.environ.update(variables_to_serve(os.environ, words))


def fail(text: str) -> NoReturn:
    """Print the reason, last and on one line, and exit 1."""
    sys.stdout.flush()
    print(f"lmi-vllm: error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(EXIT_FAILURE)
