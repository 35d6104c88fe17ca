"""TLS from a PEM pair: a context, or an error that names the option at fault."""

import ssl
from pathlib import Path
from typing import Final

from lmi_vllm.errors import StartupError

CERTIFICATE: Final = "certificate_file"
KEY: Final = "private_key_file"
_KEY_MISMATCH: Final = "KEY_VALUES_MISMATCH"


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return a server context for the pair: TLS 1.2 or newer, HTTP/1.1.

    The certificate file may hold the chain, the server's own certificate first.

    Raises:
        StartupError: a file is missing, unreadable, no PEM, encrypted, or not of this pair.
    """
    _check_pem(CERTIFICATE, certificate, "-----BEGIN CERTIFICATE-----", "certificate")
    _check_pem(KEY, key, "PRIVATE KEY-----", "private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    password = _NoPassword()
    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        if password.was_asked:
            raise StartupError(
                f"{KEY} {key}: the key is encrypted, and no passphrase can be typed here; "
                "decrypt it (openssl pkey -in KEY -out PLAIN) and protect the file instead"
            ) from error
        if error.reason == _KEY_MISMATCH:
            raise StartupError(
                f"{KEY} {key} does not belong to {CERTIFICATE} {certificate}: the server's own "
                "certificate must come first in the file, and this key must be its key"
            ) from error
        reason = error.reason or str(error)
        raise StartupError(
            f"{CERTIFICATE} {certificate} and {KEY} {key} cannot be used: {reason}"
        ) from error
    return context


class _NoPassword:
    """Answers OpenSSL's question for a passphrase and remembers that it was asked."""

    def __init__(self) -> None:
        self.was_asked = False

    def __call__(self) -> str:
        self.was_asked = True
        return ""


def _check_pem(option: str, path: str, mark: str, what: str) -> None:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"{option} {path}: {error.strerror or error}") from error
    if mark.encode() not in text:
        raise StartupError(f"{option} {path}: there is no PEM {what} in the file")
