"""The arguments of `lmi_vllm.ray:app`: the server's variables, and two words of ours."""

import contextlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]*")
_APP: Final = "of lmi_vllm.ray:app"


@dataclass(frozen=True, slots=True)
class ReplicaArguments:
    """What the server of a replica is started with, and the GPUs that the replica has."""

    words: list[str]
    variables: dict[str, str]
    gpus: float  # below 1: a part of one


def read_arguments(given: Mapping[str, Any]) -> ReplicaArguments:
    """Return what the arguments say: `command`, `gpus` (1 unless given), and variables.

    Raises:
        ValueError: another name, or a value of the wrong kind. Ray has to pickle it.
    """
    variables = dict(given)
    command, gpus = variables.pop("command", ""), variables.pop("gpus", 1)
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(
                f"argument {name} {_APP}: expected command, gpus or a variable of the server, such "
                "as HF_MODEL_ID or OPTION_MAX_MODEL_LEN"
            )
    count = _count(gpus)
    # Ray hides no GPU from a replica that asks for none, and the server would take all of them.
    hidden = {} if count else {"CUDA_VISIBLE_DEVICES": ""}
    named = {name: _text(value) for name, value in variables.items()}
    return ReplicaArguments(_words(command), hidden | named, count)


def _words(command: Any) -> list[str]:
    if isinstance(command, list):
        return [_text(word) for word in command]
    if not isinstance(command, str):
        raise ValueError(f"argument command {_APP}: expected text or a list, not {command!r}")
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"argument command {_APP}: {error}") from error


def _count(gpus: Any) -> float:
    """Return a number that Ray takes: a part of one GPU, or whole ones."""
    with contextlib.suppress(ValueError):
        if 0 <= (count := float(str(gpus))) < 1 or (count > 0 and count.is_integer()):
            return count
    raise ValueError(
        f"argument gpus {_APP}: expected a whole number from 0 on, or a part of one GPU such as "
        f"0.5, not {gpus!r}"
    )


def _text(value: Any) -> str:
    """Return a value of a YAML file as a variable has it."""
    return value if isinstance(value, str) else json.dumps(value)
