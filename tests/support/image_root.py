"""A Dockerfile carried out without Docker: stages are folders of debootstrap, entered by chroot.

It knows the instructions our Dockerfiles use, in their exec or shell form, and refuses any other.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SHELL = ["/bin/sh", "-c"]
IGNORED = ("ARG", "LABEL", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK")


@dataclass
class Stage:
    """A root folder, and what the instructions set besides files."""

    root: Path
    environ: dict[str, str] = field(
        default_factory=lambda: {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        }
    )
    workdir: str = "/"
    entry_point: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def argv(self, words: list[str]) -> list[str]:
        """Return the command that runs `words` inside, in the working directory."""
        inside = ["/usr/bin/env", "-C", self.workdir, *words]
        return ["chroot", str(self.root), *inside]

    def run(self, words: list[str], environ: dict[str, str]) -> None:
        """Run `words` inside."""
        subprocess.run(self.argv(words), env=self.environ | environ, check=True)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return each instruction with its text, comments gone and lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if not re.match(r"\s*#", line)]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, text) for name, text in pairs]


def build(dockerfile: Path, context: Path, base: Path, folder: Path, lent: dict[str, str]) -> Stage:
    """Carry out `dockerfile` over copies of `base`; return its last stage.

    `lent` are variables for RUN only, as a build argument would be: where pip looks here.
    """
    stages: dict[str, Stage] = {}
    stage = Stage(folder)
    for name, text in instructions(dockerfile):
        if name == "FROM":
            image, _, alias = text.partition(" AS ")
            if image != "debian:bookworm-slim":
                raise ValueError(f"FROM {image}: only Debian 12 can be made here")
            stage = Stage(folder / f"stage-{len(stages)}")
            subprocess.run(["cp", "-a", base, stage.root], check=True)
            stages[alias or "last"] = stage
        elif name == "COPY":
            copy(text, context, stages, stage)
        elif name == "RUN":
            stage.run([*SHELL, text], lent)
        else:
            remember(stage, name, text)
    return stage


def remember(stage: Stage, name: str, text: str) -> None:
    """Take what an instruction sets besides files; a build argument's default counts nowhere."""
    if name == "ENV":
        for word in shlex.split(text):
            key, _, value = word.partition("=")
            stage.environ[key] = value.replace("$PATH", stage.environ["PATH"])
    elif name == "WORKDIR":
        stage.workdir = text
    elif name == "ENTRYPOINT":
        stage.entry_point = json.loads(text)
    elif name == "CMD":
        stage.command = json.loads(text)
    elif name not in IGNORED:
        raise ValueError(f"{name}: not known here")


def copy(text: str, context: Path, stages: dict[str, Stage], stage: Stage) -> None:
    """Carry out COPY: from the context or from another stage."""
    words = text.split()
    source = context
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root
    *patterns, target = words
    destination = stage.root / target.lstrip("/")
    for pattern in patterns:
        found = sorted(source.glob(pattern.lstrip("/")))
        if not found:
            raise FileNotFoundError(f"COPY {pattern}: nothing there")
        for path in found:
            is_folder = target.endswith("/")
            into = destination / path.name if is_folder else destination
            into.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", path, into], check=True)


def debian_root(folder: Path) -> Path:
    """Make a minimal Debian 12 with the host's way to the network."""
    root = folder / "debian"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    (root / "lent").mkdir()
    certificates = os.environ.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt")
    if Path(certificates).exists():
        shutil.copy(certificates, root / "lent" / "ca.crt")
    for wheels in filter(None, os.environ.get("PIP_FIND_LINKS", "").split()):
        if Path(wheels).is_dir():
            shutil.copytree(wheels, root / "lent" / "wheels", dirs_exist_ok=True)
    return root
