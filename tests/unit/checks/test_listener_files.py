"""Files of listeners: a PEM pair and keys, or an error that names the option at fault."""

import ssl
from pathlib import Path

import pytest

from lmi_vllm.checks.listener_files import api_keys, tls_context
from lmi_vllm.config.load import load_settings
from lmi_vllm.errors import StartupError
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
        "LMI_API_KEY_FILE ***: No such file or directory",
        f"certificate_file {tmp_path}/server.crt: No such file or directory",
    ]
    half = {name: text for name, text in environ.items() if "KEY_FILE" not in name}
    assert len(explained("option.model_id=a/b", half).errors) == 1  # that the key is not given


def test_every_place_of_a_key_counts(tmp_path: Path) -> None:
    """Also the name that `vllm serve` reads, and each line of a file."""
    file = tmp_path / "keys"
    file.write_text("third\n\n fourth \n")
    environ = {"LMI_API_KEY": "first", "VLLM_API_KEY": "second", "LMI_API_KEY_FILE": str(file)}
    assert api_keys(load_settings(environ).server) == ("first", "second", "third", "fourth")
    empty = load_settings({"LMI_API_KEY": "", "VLLM_API_KEY": ""})
    assert api_keys(empty.server) == ()


def test_none_is_a_key_like_others() -> None:
    """What unsets an option opens no server, and no folder."""
    server = load_settings({"LMI_API_KEY": "None", "LMI_ADAPTER_ROOTS": "None"}).server
    assert (api_keys(server), server.lmi_adapter_roots) == (("None",), "None")


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff"])
def test_file_without_a_key_ends_the_start(tmp_path: Path, content: bytes | None) -> None:
    """Missing, empty or unreadable as text."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match="LMI_API_KEY_FILE"):
        api_keys(load_settings({"LMI_API_KEY_FILE": str(file)}).server)
