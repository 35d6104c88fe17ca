"""URLs of Google's and Azure's stores: what is read, and what is refused by name."""

import argparse
import json
import subprocess
import sys

import pytest

from lmi_vllm.commands import explain
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import DownloadError
from lmi_vllm.features.object_stores import cloud_urls, rules
from lmi_vllm.features.object_stores.cloud_bucket import azure_account
from lmi_vllm.features.object_stores.cloud_urls import AZURE_URLS, GCS_URLS
from tests.support.assembled import CONFIGURATION, fetch_model

SOURCES = CONFIGURATION.sources


@pytest.mark.parametrize(
    ("url", "listed"),
    [
        ("gs://bucket", "gs://bucket/"),
        ("gs://bucket/a/b", "gs://bucket/a/b/"),
        ("gs://bucket/a/b*", "gs://bucket/a/b"),
        ("az://container/a", "az://container/a/"),
        ("abfs://c@acct.dfs.core.windows.net/a", "abfs://c@acct.dfs.core.windows.net/a/"),
        ("abfss://c@acct.dfs.core.windows.net", "abfss://c@acct.dfs.core.windows.net/"),
        ("https://acct.blob.core.windows.net/c/a", "https://acct.blob.core.windows.net/c/a/"),
        ("https://acct.dfs.core.windows.net/c", "https://acct.dfs.core.windows.net/c/"),
        ("https://acct.blob.core.usgovcloudapi.net/c/m.zip",
         "https://acct.blob.core.usgovcloudapi.net/c/m.zip"),
    ],
)  # fmt: skip
def test_forms_that_are_read(url: str, listed: str) -> None:
    """Each keeps its own form, so that a folder below it has it, too."""
    urls = GCS_URLS if url.startswith("gs") else AZURE_URLS
    assert SOURCES.is_store(url)
    assert urls.parse(url).location.listed_url == listed
    assert not urls.problem(url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("gcs://bucket/a", "write gs://bucket/path"),
        ("gs:///a", "names no bucket"),
        ("az://", "names no bucket"),
        ("wasbs://c@acct.blob.core.windows.net/a", "write az://container/path with"),
        ("azure://c/a", "write az://container/path with"),
        ("abfss://c@acct.dfs.example.com/a", "write az://container/path with"),
        ("http://acct.blob.core.windows.net/c/a", "write az://container/path with"),
        ("https://acct.blob.core.windows.net", "write az://container/path with"),
        ("https://acct.blob.core.windows.net/c/a?sv=1&sig=secret", "AZURE_STORAGE_SAS_TOKEN"),
        ("az://c/a?sig=secret", "AZURE_STORAGE_SAS_TOKEN"),
    ],
)
def test_forms_that_are_refused(url: str, text: str) -> None:
    """The text says what to write, and shows no secret."""
    assert SOURCES.is_store(url)
    with pytest.raises(DownloadError) as raised:
        fetch_model(url, environ={"AZURE_STORAGE_ACCOUNT_NAME": "acct"})
    assert text in raised.value.text
    assert "secret" not in raised.value.text.replace("may be secret", "")


@pytest.mark.parametrize(
    "url",
    ["https://acct.blob.core.windows.net.evil.com/c/a", "https://example.com/c", "gsx://b/a",
     "https://evil.com/acct.blob.core.windows.net/"],
)  # fmt: skip
def test_hosts_of_others_are_no_stores(url: str) -> None:
    """Credentials are sent to Azure's own hosts."""
    assert not SOURCES.is_store(url)


def test_account_of_the_credentials() -> None:
    """Credentials of one account are not sent to another; without any, the way is named."""
    az = AZURE_URLS.parse("az://c/a")
    long = AZURE_URLS.parse("abfss://c@acct.dfs.core.windows.net/a")
    ours = {"AZURE_STORAGE_ACCOUNT_NAME": "ours"}
    assert azure_account(az, ours) == "ours"
    assert azure_account(az, {"AZURE_STORAGE_ACCOUNT": "ours"}) == "ours"
    assert azure_account(long, {}) == "acct"
    with pytest.raises(DownloadError, match="not sent to another"):
        azure_account(long, ours)
    with pytest.raises(DownloadError, match="set AZURE_STORAGE_ACCOUNT_NAME"):
        azure_account(az, {})


def test_containers_in_urls_are_no_logins() -> None:
    """abfss:// names its container before the @."""
    assert mask_urls("abfss://c@acct.dfs.core.windows.net/a") == (
        "abfss://c@acct.dfs.core.windows.net/a"
    )
    assert "secret" not in mask_urls("https://u:secret@acct.blob.core.windows.net/c")


def _explained(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str]
) -> tuple[list[str], list[str]]:
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser, CONFIGURATION)
    given = ["--format", "json", "--offline", "--model-store", "/nonexistent"]
    explain.run(parser.parse_args(given), environ, CONFIGURATION)
    document = json.loads(capsys.readouterr().out)
    return document["errors"], document["warnings"]


@pytest.mark.parametrize(
    "environ",
    [
        {"HF_MODEL_ID": "gs://b/m"},
        {"SERVING_LOAD_MODELS": "name=gs://b/m"},
        {"HF_MODEL_ID": "x/y", "OPTION_LORA_MODULES": "a=az://c/a",
         "OPTION_ENABLE_LORA": "true"},
        {"HF_MODEL_ID": "x/y", "OPTION_ADAPTER_STORE": "gs://b/a/", "OPTION_ENABLE_LORA": "true"},
    ],
)  # fmt: skip
def test_explain_finds_the_missing_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    """Before anything is fetched, of every setting with such a URL; so does a fetch."""
    assert not any("obstore" in error for error in _explained(capsys, environ)[0])
    monkeypatch.setattr(cloud_urls, "find_spec", lambda _: None)
    found = [line for lines in _explained(capsys, environ) for line in lines if "obstore" in line]
    assert len(found) == 1
    assert found[0].endswith("needs the package obstore: pip install obstore")
    with pytest.raises(DownloadError, match="pip install obstore"):
        fetch_model("gs://b/m", environ={})


@pytest.mark.parametrize(
    "environ",
    [
        {"HF_MODEL_ID": "{}"},
        {"SERVING_LOAD_MODELS": "name={}"},
        {"HF_MODEL_ID": "x/y", "OPTION_LORA_MODULES": "a={}", "OPTION_ENABLE_LORA": "true"},
        {"HF_MODEL_ID": "x/y", "OPTION_ADAPTER_STORE": "{}", "OPTION_ENABLE_LORA": "true"},
        {"HF_MODEL_ID": "x/y", "OPTION_TOKENIZER": "{}"},
        {"HF_MODEL_ID": "x/y", "LMI_CACHE_URI": "{}"},
    ],
)
@pytest.mark.parametrize(
    ("url", "account", "text"),
    [
        ("az://c/a", "", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("https://acct.blob.core.windows.net/c/a", "ours", "not sent to another"),
        ("az://c/a", "ours", ""),
        ("abfss://c@acct.dfs.core.windows.net/a", "", ""),
    ],
)
@pytest.mark.parametrize("is_option", [False, True])
def test_explain_finds_accounts_that_are_missing(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], url: str, account: str, text: str,
    *, is_option: bool,
) -> None:  # fmt: skip
    """No store need be asked for that; the account may come by `option.env`."""
    name = "AZURE_STORAGE_ACCOUNT_NAME"
    given = {key: value.format(url) for key, value in environ.items()}
    given |= {"OPTION_ENV": f"{name}={account}"} if is_option else {name: account}
    errors, _ = _explained(capsys, given)
    found = [error for error in errors if "AZURE" in error]
    assert len(found) == bool(text)
    assert not text or text in found[0]


def test_explain_without_vllm_warns_of_missing_accounts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine is to serve, and has variables of its own."""
    monkeypatch.setattr(rules, "find_spec", lambda _: None)
    errors, warnings = _explained(capsys, {"HF_MODEL_ID": "az://c/a"})
    assert not any("AZURE" in error for error in errors)
    assert any("set AZURE_STORAGE_ACCOUNT_NAME" in warning for warning in warnings)


def test_explain_finds_forms_that_are_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    """They are errors."""
    errors, _ = _explained(capsys, {"HF_MODEL_ID": "wasbs://c@acct.blob.core.windows.net/a"})
    assert any("write az://container/path" in error for error in errors)


def test_nothing_of_obstore_is_imported_before_a_fetch() -> None:
    """`explain` and `--help` stay as quick as they are."""
    script = (
        "import sys; from lmi_vllm.cli import main\n"
        "try: main(['explain', '--offline', '--model', 'gs://b/m'])\n"
        "except SystemExit: pass\n"
        "print('obstore' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
