"""Run setup.py with the Python of the environment that is there, else with the one that runs this.

An environment of any supported Python is kept, whichever one `make` was told to use. Any Python
from 2.7 on can read this file, and says which ones are supported.
"""

# Python 2.7 has none of these.
# ruff: noqa: PTH100, PTH110, PTH114, PTH118, PTH120, PTH123, RUF005, UP031

import os
import subprocess
import sys

SUPPORTED = ((3, 11), (3, 13))
UNFINISHED = "unfinished\n"  # in the stamp: what is there was interrupted
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
# What it prints counts: its version, if it can install packages.
VERSION = (
    "import sys, importlib.util as u; u.find_spec('pip') and print('%d.%d' % sys.version_info[:2])"
)


def main(words):
    """Run setup.py in place of this program; return the exit code where that is not possible."""
    is_asked = "--asked" in words  # the user has named a Python
    words = [word for word in words if word != "--asked"]
    folder = folder_of(words)
    version = version_of(os.path.join(ROOT, folder))
    ours = "%d.%d" % sys.version_info[:2]
    if os.path.islink(os.path.join(ROOT, folder)):
        return use_link(folder, version)
    if version:
        if is_asked and version != ours:
            say("%s has Python %s and is kept: remove it for %s" % (folder, version, ours))
        python = os.path.join(ROOT, folder, "bin", "python")
    elif SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        python = sys.executable
    else:
        say(
            "Python %s is not supported: use 3.11, 3.12 or 3.13 (make PYTHON=python3.12 setup "
            "chooses another one)" % ours
        )
        return 1
    sys.stdout.flush()
    os.execv(python, [python, os.path.join(HERE, "setup.py")] + words)


def use_link(folder, version):
    """Install nothing into another checkout's environment; return 0 if it can be used."""
    place = os.path.realpath(os.path.join(ROOT, folder))
    said = "is used as it is" if version else "has no Python that can be used"
    advice = "Remove the link for an environment of this checkout"
    say("%s is a link: %s %s. %s" % (folder, place, said, advice))
    return 0 if version else 1


def folder_of(words):
    """Return the folder of the environment that the arguments mean."""
    for number, word in enumerate(words):
        if word.startswith("--vllm="):
            return ".venv-vllm-" + word.partition("=")[2]
        if word == "--vllm" and number + 1 < len(words):
            return ".venv-vllm-" + words[number + 1]
    return ".venv"


def version_of(folder):
    """Return the version of an environment's Python, or "" where it has to be made ."""
    python = os.path.join(folder, "bin", "python")
    stamp = os.path.join(folder, ".lmi-vllm-setup")
    if not os.path.exists(python):
        return ""
    if os.path.exists(stamp):
        with open(stamp) as file:
            if file.read() == UNFINISHED:
                return ""
    try:
        version = subprocess.check_output([python, "-c", VERSION]).decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    known = ["3.%d" % minor for minor in range(SUPPORTED[0][1], SUPPORTED[1][1] + 1)]
    return version if version in known else ""


def say(text):
    """Print one line."""
    print("setup: " + text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
