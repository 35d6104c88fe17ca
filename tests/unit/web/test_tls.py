"""A PEM pair becomes a context, or an error that names the option at fault."""

import ssl

import pytest

from lmi_vllm.errors import StartupError
from lmi_vllm.web.tls import tls_context
from tests.support.certificates import PemPair, make_pair


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
