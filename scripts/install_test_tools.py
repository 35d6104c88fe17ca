#!/usr/bin/env python3
"""Install what only tests need (Chromium, HAProxy, nginx, Prometheus) from the distribution.

It may do so on a Debian-like machine where we are root: a container. Where npm is, it puts schemas
of custom resources (29 MB) and Azurite (186 MB) into .venv, by lock files. With
LMI_TEST_TOOLS=none nothing is installed. The tests that need a missing tool are skipped and named
at the end. Never fails: without a network those tests are skipped as well.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Folder of a lock file in tests/support -> its folder in .venv, and what it is.
PACKAGES = {
    "published_schemas": ("published-schemas", "schemas of custom resources"),
    "azurite": ("azurite", "Azurite, an Azure store on loopback"),
}
# Package -> the program that shows it is there.
TOOLS = {
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "haproxy": ("haproxy",),
    "nginx-light": ("nginx",),
    "prometheus": ("promtool",),
}
SECONDS = 600


def main() -> int:
    """Install what is missing; say what stays missing."""
    missing = [package for package in TOOLS if not is_there(package)]
    if missing and may_install():
        say(f"installing {' and '.join(missing)} for the tests")
        # No daemon may be started by a package: the tests start their own.
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        for command in (
            ["apt-get", "-qq", "update"],
            ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing],
        ):
            run(command, environ)
        missing = [package for package in missing if not is_there(package)]
    for package in missing:
        say(f"{package} is not installed: the tests that need it are skipped")
    for name, (folder, what) in PACKAGES.items():
        install_from_npm(ROOT / "tests" / "support" / name, ROOT / ".venv" / folder, what)
    return 0


def install_from_npm(locked: Path, target: Path, what: str) -> None:
    """Install what a lock file names into .venv, unless it is there."""
    if os.environ.get("LMI_TEST_TOOLS") == "none" or not (ROOT / ".venv").is_dir():
        return
    lock = (locked / "package-lock.json").read_bytes()
    present = target / "package-lock.json"
    if present.is_file() and present.read_bytes() == lock and (target / "node_modules").is_dir():
        return
    shutil.rmtree(target, ignore_errors=True)
    if shutil.which("npm") is not None:
        say(f"installing {what} for the tests")
        shutil.copytree(locked, target)
        npm = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        run(npm, dict(os.environ), target)
    if not (target / "node_modules").is_dir():
        say(f"not installed (npm): {what}; the tests that need it are skipped")


def is_there(package: str) -> bool:
    """Whether one of the package's programs is found."""
    return any(map(shutil.which, TOOLS[package]))


def may_install() -> bool:
    """Whether this machine is ours to change."""
    is_wanted = os.environ.get("LMI_TEST_TOOLS") != "none"
    return is_wanted and os.geteuid() == 0 and shutil.which("apt-get") is not None


def run(command: list[str], environ: dict[str, str], folder: Path = ROOT) -> None:
    """Run a command; a failure only means that the tool stays missing."""
    try:
        subprocess.run(
            command,
            cwd=folder,
            env=environ,
            timeout=SECONDS,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"{' '.join(command)}: {error}")


def say(text: str) -> None:
    """Print one line at once."""
    print(f"test tools: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
