"""Certificates for one test, made by openssl."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class PemPair:
    """A self-signed certificate for 127.0.0.1, and its key."""

    certificate: Path
    key: Path


CURVE: Final = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")


def make_pair(
    folder: Path, name: str = "server", passphrase: str = "", kind: Sequence[str] = CURVE
) -> PemPair:
    """Return a new pair, its key as PKCS#8; with a passphrase the key is encrypted."""
    pair = PemPair(folder / f"{name}.crt", folder / f"{name}.key")
    locked = ["-passout", f"pass:{passphrase}"] if passphrase else ["-noenc"]
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", *kind),
            *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(pair.key), "-out", str(pair.certificate), *locked),
        ],
        check=True,
        capture_output=True,
    )
    return pair


def as_traditional(key: Path) -> None:
    """Write the key in OpenSSL's older form: PKCS#1 of an RSA key, SEC 1 of a curve's."""
    command = ["openssl", "pkey", "-in", str(key), "-traditional"]
    key.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
