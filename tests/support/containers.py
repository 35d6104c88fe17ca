"""Images built by buildah and run by podman, without a daemon, in a storage of their own."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BASE = "docker.io/library/debian:bookworm-slim"
CERTIFICATES = "/lent/ca.crt"
# A container raises limits, which takes CAP_SYS_RESOURCE; where that is missing they are left out.
RUNTIME = """\
#!/usr/bin/env python3
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
for flag, file in zip(words, words[1:]):
    if flag in ("--bundle", "-b", "--process", "-p"):
        path = Path(file) / "config.json" if flag in ("--bundle", "-b") else Path(file)
        told = json.loads(path.read_text())
        told.get("process", told).pop("rlimits", None)
        path.write_text(json.dumps(told))
os.execv("{runc}", ["runc", *words])
"""


@dataclass(frozen=True)
class Containers:
    """Images and containers that lie below `folder`."""

    folder: Path

    def buildah(self, *words: str) -> str:
        """Run buildah to the end; return what it said."""
        command = ["buildah", *self._storage(), *words]
        environ = os.environ | {"STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}
        return subprocess.run(
            command, env=environ, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    def podman(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run podman to the end, whatever its exit code."""
        return subprocess.run(self.command(*words), capture_output=True, text=True, check=False)

    def command(self, *words: str) -> list[str]:
        """Return podman's command line."""
        options = ["--storage-driver", "overlay", "--cgroup-manager", "cgroupfs"]
        runtime = ["--events-backend", "file", "--runtime", str(self._runtime())]
        return ["podman", *self._storage(), *options, *runtime, *words]

    def make_base(self, name: str, root: Path) -> None:
        """Make the image `name` of the files below `root`."""
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, str(root), "/")
        self.buildah("commit", "--quiet", "--rm", container, name)

    def build(self, dockerfile: Path, context: Path, tag: str, arguments: Mapping[str, str]) -> str:
        """Build `dockerfile` as it is, with pip's configuration of this machine; return the tag."""
        words = ["bud", "--format", "docker", "--pull-never", "--layers", "--tag", tag]
        for name, value in arguments.items():
            words += ["--build-arg", f"{name}={value}"]
        for place, inside in self._lent().items():
            words += ["--volume", f"{place}:{inside}:ro"]
        self.buildah(*words, "--file", str(dockerfile), str(context))
        return tag

    def layers(self, tag: str) -> list[tuple[int, str]]:
        """Return size and instruction of each layer that has bytes, the newest first."""
        told = self.podman("history", "--format", "json", "--human=false", tag).stdout
        rows = [(int(row["size"]), str(row["CreatedBy"])) for row in json.loads(told)]
        return [row for row in rows if row[0]]

    def remove(self) -> None:
        """Remove everything."""
        self.podman("rm", "--all", "--force")
        self.podman("rmi", "--all", "--force")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _storage(self) -> list[str]:
        return ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")]

    def _runtime(self) -> Path:
        path = self.folder / "bin" / "runc"  # podman goes by the name of the file
        if not path.exists():
            path.parent.mkdir(parents=True)
            path.write_text(RUNTIME.replace("{runc}", str(shutil.which("runc"))))
            path.chmod(0o755)
        return path

    def _lent(self) -> dict[str, str]:
        """Where pip looks on this machine, by where it is to look inside."""
        settings = pip_settings()
        certificates = settings.pop("cert", "/etc/ssl/certs/ca-certificates.crt")
        words = " ".join(settings.values()).replace("file://", "").split()
        paths = [Path(word) for word in words if word.startswith("/") and Path(word).exists()]
        # With what is beside: an index may point there. Not all of /opt, where the image installs.
        found = {path.parent if len(path.parts) > 3 else path for path in paths}
        lent = {str(path): str(path) for path in found if not found & set(path.parents)}
        lines = ["[global]", f"cert = {CERTIFICATES}"]
        file = self.folder / "pip.conf"
        file.write_text("\n".join([*lines, *(f"{k} = {v}" for k, v in settings.items())]) + "\n")
        return lent | {str(file): "/etc/pip.conf", certificates: CERTIFICATES}


def pip_settings() -> dict[str, str]:
    """Return what pip is configured with here, by the names of its options."""
    listed = subprocess.run(
        ["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    pairs = (line.partition("=") for line in listed.splitlines())
    return {name.rpartition(".")[2]: value.strip("'\"") for name, _, value in pairs}
