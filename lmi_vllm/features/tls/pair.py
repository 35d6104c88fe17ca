"""The PEM pair of `https://` addresses; each fault names the option."""

import contextlib
import logging
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.listen import INFERENCE, MANAGEMENT, read_address
from lmi_vllm.config.options.row import SERVER_LEVEL, option, ours
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import FeatureSettings, ServerSettings, Settings
from lmi_vllm.errors import StartupError
from lmi_vllm.sources.table import Sources

logger = logging.getLogger(__name__)

CERTIFICATE: Final = "certificate_file"
KEY: Final = "private_key_file"
_KEY_MISMATCH: Final = "KEY_VALUES_MISMATCH"


class TlsSettings(FeatureSettings):
    """The files of the pair, by LMI's names."""

    section: ClassVar[str] = "Server"

    # fmt: off
    private_key_file: str | None = option(parse.plain_text, ours(), written=SERVER_LEVEL,
        values="path", note="PEM key for https.")
    certificate_file: str | None = option(parse.plain_text, ours(), written=SERVER_LEVEL,
        values="path", note="PEM certificate for https.")
    # fmt: on

    def check(self, server: ServerSettings, sources: Sources, fail: Callable[[str], None]) -> None:
        """Report addresses and files that do not go together."""
        for sentence in self.missing(server):
            fail(sentence)
        given = (self.details.certificate_file, self.details.private_key_file)
        for setting in given if not _secure(server) else ():
            if setting.value:
                fail(f"{setting.label} has no effect: {_why_none(server)}")

    def missing(self, server: ServerSettings) -> Iterator[str]:
        """Yield what https addresses lack."""
        files = {CERTIFICATE: self.certificate_file, KEY: self.private_key_file}
        for address in _secure(server):
            for name in (name for name, path in files.items() if not path):
                yield f"{address.stated} needs {name}, a PEM file"


def _why_none(server: ServerSettings) -> str:
    """Return why no address is encrypted; none is."""
    address = server.details.inference_address
    if str(address.value).startswith("unix:"):
        return f"{address.stated} is a Unix socket, which has no TLS here; leave out one of them"
    return f"neither {INFERENCE} nor {MANAGEMENT} begins with https://"


def _secure(server: ServerSettings) -> list[Setting]:
    """Return the addresses that begin with https."""
    said = server.details
    given = [one for one in (said.inference_address, said.management_address) if one.value]
    return [one for one in given if read_address(str(one.value), one.name).is_tls]


def tls_of(settings: Settings, environ: Mapping[str, str]) -> ssl.SSLContext:
    """Return the context of the PEM pair; relative paths begin at LMI's home, if that is set.

    Raises:
        StartupError: the pair cannot be used.
    """
    pair = settings.feature(TlsSettings)
    for sentence in pair.missing(settings.server):
        raise StartupError(sentence)
    home = Path(environ.get("MODEL_SERVER_HOME") or ".")
    certificate, key = (
        str(home / (path or "")) for path in (pair.certificate_file, pair.private_key_file)
    )
    return renewed_context(certificate, key)


def renewed_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return the context of the pair, whose files are read again when they have changed.

    Raises:
        StartupError: the pair cannot be used now.
    """
    context = tls_context(certificate, key)
    context.sni_callback = Renewal(context, certificate, key)
    return context


class Renewal:
    """Gives each new connection the pair as its files are now; open connections keep theirs.

    OpenSSL calls it at the beginning of every handshake, with a name of the server or without. A
    pair that cannot be used (only one of its files has been written yet) leaves the earlier one.
    """

    def __init__(self, context: ssl.SSLContext, certificate: str, key: str) -> None:
        self._current = context
        self._certificate, self._key = certificate, key
        self._stamp = self._stamp_of_files()

    def __call__(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        """Choose the context of one handshake."""
        stamp = self._stamp_of_files()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current = tls_context(self._certificate, self._key)
                logger.info("%s and %s were renewed: %s", CERTIFICATE, KEY, self._certificate)
            except StartupError as error:
                logger.error("%s; new connections get the earlier pair", error.text)
        connection.context = self._current

    def _stamp_of_files(self) -> tuple[tuple[int, int, int], ...]:
        """What changes when one of the files is written or replaced; empty for a missing one."""
        found = []
        for path in (self._certificate, self._key):
            with contextlib.suppress(OSError):
                state = Path(path).stat()
                found.append((state.st_mtime_ns, state.st_size, state.st_ino))
        return tuple(found)


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
