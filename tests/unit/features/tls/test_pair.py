"""A PEM pair, or an error that names the option at fault."""

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from lmi_vllm.config.listen import ListenAddress, ListenPlan, listen_plan
from lmi_vllm.errors import StartupError
from lmi_vllm.features.tls.pair import TlsSettings, renewed_context, tls_context, tls_of
from tests.support.assembled import load_settings
from tests.support.certificates import PemPair, make_pair
from tests.unit.conftest import ExplainRun


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PemPair]:
    """Return a good pair, another, and one whose key is encrypted."""
    folder = tmp_path_factory.mktemp("pem")
    return {
        "server": make_pair(folder),
        "other": make_pair(folder, "other"),
        "locked": make_pair(folder, "locked", "sesame"),
    }


def test_tls_context_needs_tls_1_2(pairs: dict[str, PemPair]) -> None:
    """Nothing older than TLS 1.2 is spoken."""
    pair = pairs["server"]
    context = tls_context(str(pair.certificate), str(pair.key))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


FAULTS = {
    "missing certificate": (
        "{dir}/none.crt",
        "{server}.key",
        "certificate_file {dir}/none.crt",
    ),
    "missing key": ("{server}.crt", "{dir}/none.key", "private_key_file {dir}/none.key: No such"),
    "a folder": ("{dir}", "{server}.key", "certificate_file {dir}: Is a directory"),
    "swapped": ("{server}.key", "{server}.crt", "certificate_file {server}.key: there is no PEM"),
    "no key in it": ("{server}.crt", "{server}.crt", "private_key_file {server}.crt: there is no"),
    "mismatched": ("{server}.crt", "{dir}/other.key", "private_key_file {dir}/other.key does not"),
    "encrypted": ("{dir}/locked.crt", "{dir}/locked.key", "the key is encrypted"),
    "broken": ("{dir}/broken.pem", "{server}.key", "certificate_file {dir}/broken.pem and"),
}


@pytest.mark.parametrize(("certificate", "key", "said"), FAULTS.values(), ids=FAULTS)
def test_tls_context_faults_name_the_option(
    certificate: str, key: str, said: str, pairs: dict[str, PemPair]
) -> None:
    """The error names the file and how to fix it."""
    folder = pairs["server"].certificate.parent
    (folder / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nnot base64\n")
    names = {"dir": str(folder), "server": str(folder / "server")}
    with pytest.raises(StartupError) as caught:
        tls_context(certificate.format(**names), key.format(**names))
    assert said.format(**names) in caught.value.text


SECURE = {
    "SERVING_MANAGEMENT_ADDRESS": "https://127.0.0.1:8444",
    "SERVING_CERTIFICATE_FILE": "server.crt",
    "SERVING_PRIVATE_KEY_FILE": "server.key",
}


def test_explain_names_files_that_a_listener_could_not_use(
    pairs: dict[str, PemPair], explained: ExplainRun, tmp_path: Path
) -> None:
    """All at once, before a start is tried; as the start, from LMI's home."""
    home = {"MODEL_SERVER_HOME": str(pairs["server"].certificate.parent)}
    good = explained("option.model_id=a/b", SECURE | home)
    assert (good.exit_code, good.errors) == (0, [])
    missing = str(tmp_path / "keys")
    environ = {**SECURE, "MODEL_SERVER_HOME": str(tmp_path), "LMI_API_KEY_FILE": missing}
    found = explained("option.model_id=a/b", environ)
    assert found.exit_code == 2
    assert found.errors == [
        f"LMI_API_KEY_FILE {missing}: No such file or directory",
        f"certificate_file {tmp_path}/server.crt: No such file or directory",
    ]
    half = {name: text for name, text in environ.items() if "KEY_FILE" not in name}
    assert len(explained("option.model_id=a/b", half).errors) == 1  # that the key is not given


PAIR = {"SERVING_CERTIFICATE_FILE": "/c.pem", "SERVING_PRIVATE_KEY_FILE": "/k.pem"}
UNFIT = {
    "no key": (
        {"SERVING_INFERENCE_ADDRESS": "https://a:1", "SERVING_CERTIFICATE_FILE": "/c"},
        "inference_address=https://a:1 (SERVING_INFERENCE_ADDRESS) needs private_key_file",
    ),
    "no certificate for management": (
        {"SERVING_MANAGEMENT_ADDRESS": "https://a:1", "SERVING_PRIVATE_KEY_FILE": "/k"},
        "(SERVING_MANAGEMENT_ADDRESS) needs certificate_file",
    ),
    "files without https": (PAIR, "certificate_file (SERVING_CERTIFICATE_FILE) has no effect"),
}


def test_an_https_address_and_its_pair_go_together() -> None:
    """With LMI's port for it."""
    settings = load_settings({"SERVING_INFERENCE_ADDRESS": "https://0.0.0.0", **PAIR})
    assert settings.errors == ()
    assert listen_plan(settings.server) == ListenPlan(ListenAddress("https", "0.0.0.0", 8443))
    pair = settings.feature(TlsSettings)
    assert (pair.certificate_file, pair.private_key_file) == ("/c.pem", "/k.pem")


@pytest.mark.parametrize(("environ", "said"), UNFIT.values(), ids=UNFIT)
def test_addresses_and_files_that_do_not_go_together(environ: dict[str, str], said: str) -> None:
    """Plain text is never served by mistake, whichever module opens the port."""
    settings = load_settings(environ)
    assert any(said in error for error in settings.errors)
    with pytest.raises(StartupError):
        tls_of(settings, environ)


async def test_renewed_pair_is_given_to_new_connections(
    pairs: dict[str, PemPair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream over the old certificate goes on; half a renewal leaves the old pair."""
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_bytes(pairs["server"].certificate.read_bytes())
    key.write_bytes(pairs["server"].key.read_bytes())
    context = renewed_context(str(certificate), str(key))

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await connect(port)
        assert subject(writer) == "server"
        certificate.write_bytes(pairs["other"].certificate.read_bytes())
        _, second = await connect(port)
        assert subject(second) == "server"
        assert "new connections get the earlier pair" in caplog.text
        key.write_bytes(pairs["other"].key.read_bytes())
        _, third = await connect(port, name="a.example")
        _, fourth = await connect(port)
        assert (subject(third), subject(fourth)) == ("other", "other")
        writer.write(b"still here\n")
        assert await reader.readline() == b"still here\n"
        for one in (writer, second, third, fourth):
            one.close()


async def connect(port: int, name: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a new connection; without a name the client sends none (SNI)."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name or "")


def subject(writer: asyncio.StreamWriter) -> str:
    """Return the name in the certificate that the server showed."""
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    pem = ssl.DER_cert_to_PEM_cert(shown)
    done = subprocess.run(
        ["openssl", "x509", "-noout", "-subject", "-nameopt", "multiline"],
        input=pem, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.rsplit("= ", 1)[-1].strip()
