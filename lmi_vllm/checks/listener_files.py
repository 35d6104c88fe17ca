"""The files that a listener needs: a PEM pair, and keys; each fault names the option."""

import ssl
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from lmi_vllm.config.listen import ListenPlan, listen_plan
from lmi_vllm.config.options import ServerOptions
from lmi_vllm.errors import StartupError

CERTIFICATE: Final = "certificate_file"
KEY: Final = "private_key_file"
_KEY_MISMATCH: Final = "KEY_VALUES_MISMATCH"


def listener_file_errors(server: ServerOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return why the server could not listen with its files as they are now."""
    plan = listen_plan(server)
    reads: list[Callable[[], object]] = [partial(api_keys, server)]
    if plan.is_tls and plan.certificate_file and plan.private_key_file:
        reads.append(partial(tls_of, plan, environ))
    errors = []
    for read in reads:
        try:
            read()
        except StartupError as error:
            errors.append(error.text)
    return tuple(errors)


def tls_of(plan: ListenPlan, environ: Mapping[str, str]) -> ssl.SSLContext:
    """Return the context of the PEM pair; relative paths begin at LMI's home, if that is set.

    Raises:
        StartupError: the pair cannot be used.
    """
    home = Path(environ.get("MODEL_SERVER_HOME") or ".")
    return tls_context(str(home / plan.certificate_file), str(home / plan.private_key_file))


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


def api_keys(server: ServerOptions) -> tuple[str, ...]:
    """Return the keys that open the server; none means it is open.

    Raises:
        StartupError: the key file cannot be read, or holds no key: never an open server instead.
    """
    keys = [key for key in (server.lmi_api_key, server.vllm_api_key) if key]
    if path := server.lmi_api_key_file:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the file is no UTF-8 text"
            raise StartupError(f"LMI_API_KEY_FILE {path}: {reason}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise StartupError(f"LMI_API_KEY_FILE {path}: the file holds no key")
        keys += found
    return tuple(keys)
