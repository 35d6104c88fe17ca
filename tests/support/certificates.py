"""Certificates for one test, made by openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PemPair:
    """A self-signed certificate for 127.0.0.1, and its key."""

    certificate: Path
    key: Path


def make_pair(folder: Path, name: str = "server", passphrase: str = "") -> PemPair:
    """Return a new pair; with a passphrase the key is encrypted."""
    pair = PemPair(folder / f"{name}.crt", folder / f"{name}.key")
    locked = ["-passout", f"pass:{passphrase}"] if passphrase else ["-noenc"]
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(pair.key), "-out", str(pair.certificate), *locked),
        ],
        check=True,
        capture_output=True,
    )
    return pair
