"""Turn our engine arguments into vLLM's own, exactly as its command line would read them."""

import json
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lmi_vllm.errors import ConfigurationError

try:  # 0.33 moved it; the old path is the one of 0.32
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser


# A field of AsyncEngineArgs that has no flag: where weights are streamed from, model being local.
_FLAGLESS: Final = ("model_weights",)


class _RaisingParser(FlexibleArgumentParser):  # type: ignore[misc,unused-ignore]
    """vLLM's parser, raising where it would print its whole usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_vllm_arguments(
    values: Mapping[str, object], origins: Mapping[str, object] | None = None
) -> Namespace:
    """Return the namespace `vllm serve` would have for `values`; `origins` go into errors.

    Raises:
        ConfigurationError: one problem per value that vLLM refuses, in vLLM's words.
    """
    parser = make_arg_parser(_RaisingParser(add_help=False))
    actions = {action.dest: action for action in parser._actions}
    problems, words = [], []
    flagless = {name: values[name] for name in _FLAGLESS if name in values}
    for name, value in values.items():
        if name in flagless:
            continue
        shown = f"{name} ({(origins or {}).get(name, 'default')})"
        if name not in actions:
            problems.append(f"{shown}: the installed vLLM has no such engine argument")
            continue
        try:
            flag_words = _words(actions[name], value)
            parser.parse_args(flag_words)
        except (ValueError, TypeError) as error:
            problems.append(f"{shown}: vLLM refuses it: {error}")
        else:
            words += flag_words
    if problems:
        raise ConfigurationError(problems)
    return Namespace(**{**vars(parser.parse_args(words)), **flagless})


def engine_args_from(namespace: Namespace) -> AsyncEngineArgs:
    """Return vLLM's engine arguments for a parsed namespace."""
    return AsyncEngineArgs.from_cli_args(namespace)


def _words(action: Any, value: object) -> list[str]:
    """Return the command-line words that give `action` this value; none where it is the default."""
    flag = next(option for option in action.option_strings if option.startswith("--"))
    if value is None:
        return []
    if action.nargs == 0:
        return _switch(action, flag, value)
    if action.nargs in ("+", "*"):
        items = value if isinstance(value, (list, tuple)) else str(value).split(",")
        return [flag, *map(_text, items)]
    return [f"{flag}={_text(value)}"]


def _switch(action: Any, flag: str, value: object) -> list[str]:
    if str(value).lower() in ("true", "1"):
        return [flag]
    if str(value).lower() not in ("false", "0"):
        raise ValueError("expected true or false")
    negation = next((text for text in _opposites(flag) if text in action.option_strings), None)
    if negation is None and isinstance(action, BooleanOptionalAction):
        raise ValueError("this vLLM has no flag that switches it off")
    return [] if negation is None else [negation]


def _opposites(flag: str) -> list[str]:
    """The flags that may switch `flag` off; from 0.33 vLLM pairs --enable-x with --disable-x."""
    bare = flag.removeprefix("--")
    found = ["--no-" + bare]
    for one, other in (("enable-", "disable-"), ("disable-", "enable-")):
        if bare.startswith(one):
            found.append("--" + other + bare.removeprefix(one))
    return found


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return json.dumps(value) if isinstance(value, (bool, list, tuple)) else str(value)
