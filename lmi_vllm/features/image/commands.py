"""The commands of vLLM's server in our images: they lead here.

Kubernetes replaces the entry point of an image by `command: ["vllm", "serve", …]`, or by `python -m
vllm.entrypoints.openai.api_server`. So the program `vllm` is ours there, and a `.pth` file sees the
second form when Python starts.
"""

import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

VLLM_SERVER: Final = "vllm.entrypoints.openai.api_server"
PLAIN_VLLM: Final = "LMI_PLAIN_VLLM"  # 1: vLLM's own program
PLAIN_PROGRAM: Final = "vllm-plain"  # its name beside ours
_PTH: Final = "lmi_vllm_commands.pth"


def as_vllm_command(words: list[str], environ: Mapping[str, str]) -> list[str] | None:
    """Return our own words for a command of vLLM's server; None for any other command."""
    program = Path(words[0]).name
    if program == "vllm" and words[1:2] == ["serve"]:
        rest = words[2:]
    elif program.startswith("python") and words[1:3] == ["-m", VLLM_SERVER]:
        rest = words[3:]
    else:
        return None
    if environ.get(PLAIN_VLLM) == "1":
        said = f"lmi-vllm: {PLAIN_VLLM}=1: vLLM's own server starts"
        sys.stderr.write(f"{said}\n")
        return None
    return ["serve", "--vllm-defaults", *rest]


def asks_release(words: list[str], environ: Mapping[str, str]) -> bool:
    """Whether a command asks for vLLM's release, by which scripts of charts choose its flags."""
    is_asked = Path(words[0]).name == "vllm" and words[1:] in (["--version"], ["-v"])
    return is_asked and environ.get(PLAIN_VLLM) != "1"


def lead() -> None:
    """Run our entry point in the place of vLLM's server; called by the `.pth` file."""
    if is_vllm_server(sys.orig_argv) and os.environ.get(PLAIN_VLLM) != "1":
        module = sys.orig_argv[sys.orig_argv.index("-m") :]
        words = [sys.executable, "-P", "-m", str(__package__), "python", *module]
        os.execv(sys.executable, words)


def is_vllm_server(words: Sequence[str]) -> bool:
    """Whether a Python's command line runs vLLM's server, rather than having it as an argument."""
    return "-m" in words and VLLM_SERVER in words[words.index("-m") :][1:2]


def install(programs: Path, packages: Path) -> None:
    """Put both into an environment: our `vllm`, the one that is there beside it, the `.pth` file.

    `programs` is its bin folder and `packages` its site-packages. It can be run again.
    """
    program, plain = programs / "vllm", programs / PLAIN_PROGRAM
    if program.exists() and not plain.exists():
        program.rename(plain)
    python = shlex.quote(sys.executable)
    program.write_text(f'#!/bin/sh\nexec {python} -P -m {__package__} vllm "$@"\n')
    program.chmod(0o755)
    asked = f'"{VLLM_SERVER}" in sys.orig_argv'
    module = __name__
    call = f'__import__("{module}", fromlist=["lead"]).lead()'
    (packages / _PTH).write_text(f"import sys; {asked} and {call}\n")


def install_here() -> None:
    """Do so in the environment of this Python."""
    install(Path(sysconfig.get_path("scripts")), Path(sysconfig.get_path("purelib")))
