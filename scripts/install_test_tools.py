#!/usr/bin/env python3
"""Install what only tests need (Chromium, HAProxy, nginx, Prometheus) from the distribution.

It may do so on a Debian-like machine where we are root: a container. Elsewhere, and with
LMI_TEST_TOOLS=none, nothing is installed; the tests that need a missing tool are then skipped and
named at the end. Never fails: without a network those tests are skipped as well.
"""

import os
import shutil
import subprocess
import sys

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
    return 0


def is_there(package: str) -> bool:
    """Whether one of the package's programs is found."""
    return any(map(shutil.which, TOOLS[package]))


def may_install() -> bool:
    """Whether this machine is ours to change."""
    is_wanted = os.environ.get("LMI_TEST_TOOLS") != "none"
    return is_wanted and os.geteuid() == 0 and shutil.which("apt-get") is not None


def run(command: list[str], environ: dict[str, str]) -> None:
    """Run a command; a failure only means that the tool stays missing."""
    try:
        subprocess.run(
            command,
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
