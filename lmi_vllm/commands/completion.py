"""`completion`: a script with which bash or zsh completes verbs, flags, and what follows them.

It is made of the parsers themselves and of vLLM's recorded flags, so nothing is imported while
someone types. argcomplete would start Python, and our imports, at each press of the key.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Final

from lmi_vllm.config.vllm_schema import load_release
from lmi_vllm.translate.configuration import Configuration

_PASSES_FLAGS: Final = ("serve", "explain", "validate")  # those of `vllm serve`, too
_ZSH: Final = "autoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT: Final = """\
_lmi_vllm() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    case "${{COMP_WORDS[1]}} $before" in
{values}
    esac
    if [ -z "$words" ]; then
        if [ "$COMP_CWORD" -eq 1 ]; then words="{verbs}"; else
            case "${{COMP_WORDS[1]}}" in
{flags}
            esac
        fi
        case "$word" in -*) ;; *) [ "$COMP_CWORD" -eq 1 ] || words= ;; esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _lmi_vllm lmi-vllm
"""


def add_arguments(parser: argparse.ArgumentParser, _: Configuration) -> None:
    """Declare the shell."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads the script")


def run(
    arguments: argparse.Namespace, _environ: Mapping[str, str], _configuration: Configuration
) -> int:
    """Print the script; returns 0. `arguments.parsers` are those of all verbs."""
    print(_ZSH * (arguments.shell == "zsh") + script(arguments.parsers), end="")
    return 0


def script(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the script for bash, by the verbs' parsers; files complete what has no words."""
    values = [
        f'        "{verb} {flag}") words="{" ".join(map(str, action.choices))}" ;;'
        for verb, parser in parsers.items()
        for action in parser._actions
        if action.choices
        for flag in action.option_strings or [verb]
    ]
    flags = [
        f'                {verb}) words="{" ".join(sorted(_flags(verb, parser)))}" ;;'
        for verb, parser in parsers.items()
    ]
    return _SCRIPT.format(verbs=" ".join(parsers), values="\n".join(values), flags="\n".join(flags))


def _flags(verb: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (flag for flag in action.option_strings if flag.startswith("--"))
    if verb in _PASSES_FLAGS:
        release = load_release()
        for name in {*release.engine, *release.front_end}:
            yield f"--{name.replace('_', '-')}"
