"""Where an adapter may come from, and what is refused on the way."""

import json
import os
from pathlib import Path

import pytest

from lmi_vllm.adapters.source import AdapterPolicy, local_adapters
from lmi_vllm.checks.adapter_config import CONFIG, WEIGHTS
from lmi_vllm.errors import AdapterConflictError, AdapterRefusedError
from lmi_vllm.server.adapter_start import adapter_policy
from lmi_vllm.sources.table import Sources
from tests.support.adapter_files import CAPITALS, copy_adapter
from tests.support.assembled import CONFIGURATION, AdapterSources, load_settings


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A sound adapter."""
    return copy_adapter(tmp_path / "adapter")


def resolve(src: object, **environ: str) -> str:
    """Resolve a source under an environment."""
    return AdapterSources(
        environ, adapter_policy(load_settings(environ), CONFIGURATION.security)
    ).resolve(str(src))


def test_local_sources_name_one_folder(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absolute, relative and file:// name the same folder."""
    monkeypatch.chdir(tmp_path)
    for src in (adapter, "adapter", "./adapter", adapter.as_uri()):
        assert resolve(src) == str(adapter)


@pytest.mark.parametrize("src", ["https://host/a", "http://host/a", "ftp://host/a"])
def test_url_is_a_conflict(src: str) -> None:
    """URL schemes that are never fetched are 409, as upstream."""
    with pytest.raises(AdapterConflictError, match="URL adapters are not currently supported"):
        resolve(src)


@pytest.mark.parametrize("src", ["/no/such/folder", "file:///no/such/folder", "./nothing"])
def test_missing_path_is_refused(src: str) -> None:
    """A path that is not there is refused in upstream's words."""
    with pytest.raises(AdapterRefusedError, match="Only local LoRA models are supported"):
        resolve(src)


@pytest.mark.parametrize("src", ["a\0b", "file:///a%00b", "x" * 5000, "/" + "x" * 300])
def test_text_that_is_no_path_is_refused(src: str) -> None:
    """A zero byte or too long a name is a refusal, not an error of ours."""
    with pytest.raises(AdapterRefusedError, match="Only local LoRA models are supported"):
        resolve(src, LMI_ADAPTER_ROOTS="/elsewhere")


@pytest.mark.parametrize("src", ["s3://[", "file://[/a", "http://["])
def test_url_with_an_incomplete_address_is_refused(src: str) -> None:
    """What Python's own parser raises for it is a refusal."""
    with pytest.raises(AdapterRefusedError, match="is not a valid URL"):
        resolve(src)


def test_ring_of_links_is_refused(tmp_path: Path) -> None:
    """Links that lead to each other are no adapter and no error of ours."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(AdapterRefusedError, match="Only local LoRA models are supported"):
        resolve(tmp_path / "a", LMI_ADAPTER_ROOTS=str(tmp_path))


def test_adapters_of_the_model_need_no_root(adapter: Path) -> None:
    """What came with the model was put there by the operator; paths of clients are confined."""
    policy = AdapterPolicy(roots=(Path("/elsewhere"),))
    sources = AdapterSources({}, policy, own=frozenset({str(adapter)}))
    assert sources.resolve(str(adapter)) == str(adapter)
    with pytest.raises(AdapterRefusedError, match="LMI_ADAPTER_ROOTS"):
        sources.resolve(f"{adapter}/.")


def test_hub_id_is_refused_unless_the_setting_allows_it() -> None:
    """A hub id is never fetched without LMI_ADAPTER_HUB, and the refusal names it."""
    with pytest.raises(AdapterRefusedError, match="LMI_ADAPTER_HUB=true"):
        resolve("someone/french")


def test_roots_confine_links_too(adapter: Path, tmp_path: Path) -> None:
    """Whether a folder is below the roots is decided after links are followed."""
    inside = copy_adapter(tmp_path / "allowed" / "inside")
    (tmp_path / "allowed" / "link").symlink_to(adapter)
    roots = os.pathsep.join([str(tmp_path / "allowed"), "/elsewhere"])
    assert resolve(inside, LMI_ADAPTER_ROOTS=roots)
    for src in (adapter, tmp_path / "allowed" / "link", tmp_path / "allowed" / ".." / "adapter"):
        with pytest.raises(AdapterRefusedError, match="LMI_ADAPTER_ROOTS"):
            resolve(src, LMI_ADAPTER_ROOTS=roots)
    with pytest.raises(AdapterRefusedError, match="LMI_ADAPTER_ROOTS"):
        resolve(adapter.as_uri(), LMI_ADAPTER_ROOTS=roots)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """An adapter with code, in a folder below a root."""
    folder = copy_adapter(tmp_path / "root" / "code")
    (folder / "model.py").write_text("")
    return folder


def test_code_of_a_registered_adapter_needs_two_settings(code: Path, tmp_path: Path) -> None:
    """Off by default; on with a value of its own and roots; unread with none."""
    roots = {"LMI_ADAPTER_ROOTS": str(tmp_path / "root")}
    for environ in ({}, roots, {"LMI_CUSTOM_CODE": "roots"}, {"LMI_CUSTOM_CODE": "all"}):
        with pytest.raises(AdapterRefusedError, match="LMI_CUSTOM_CODE=roots and from below"):
            resolve(code, **environ)
    for value in ("roots", "all"):
        assert resolve(code, LMI_CUSTOM_CODE=value, **roots)
    assert resolve(code, LMI_CUSTOM_CODE="none")


def test_code_that_came_with_the_model_is_the_model_s(code: Path, tmp_path: Path) -> None:
    """Registered at the start, or again later from the model's directory."""
    assert AdapterSources({}, own=frozenset({str(code)})).resolve(str(code))
    assert AdapterSources({}, model_directory=code.parent).resolve(str(code))
    link = tmp_path / "model" / "link"
    link.parent.mkdir()
    link.symlink_to(code)
    with pytest.raises(AdapterRefusedError, match="LMI_CUSTOM_CODE"):
        AdapterSources({}, model_directory=link.parent).resolve(str(link))


@pytest.mark.parametrize(
    ("name", "mode"), [("", 0o777), ("..", 0o777), ("model.py", 0o666), ("new", 0o777)]
)
def test_code_that_others_may_change_is_never_run(code: Path, name: str, mode: int) -> None:
    """The folder, the one around it, the file, and any folder inside."""
    (code / "new").mkdir()
    (code / name).chmod(mode)
    with pytest.raises(AdapterRefusedError, match=r"is world-writable .* chmod o-w"):
        resolve(code, LMI_CUSTOM_CODE="roots", LMI_ADAPTER_ROOTS=str(code.parent))


@pytest.mark.parametrize("name", ["", "..", "model.py"])
def test_fetched_code_that_others_may_change_is_never_run(
    code: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The folder that is fetched into may be one that others share."""
    monkeypatch.setattr(Sources, "fetch_model", lambda *_, **__: code)
    allowed = {"LMI_CUSTOM_CODE": "all", "LMI_ADAPTER_HUB": "true"}
    assert resolve("acme/code", **allowed)
    (code / name).chmod(0o777)
    with pytest.raises(AdapterRefusedError, match=r"is world-writable .* chmod o-w"):
        resolve("acme/code", **allowed)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives files to another user")
@pytest.mark.parametrize("name", ["", "..", "model.py"])
def test_code_of_another_user_is_never_run(code: Path, name: str) -> None:
    """Whether the user owns the file, its folder, or the one around it."""
    os.chown(code / name, 65534, 65534)
    with pytest.raises(AdapterRefusedError, match="belongs to user 65534"):
        resolve(code, LMI_CUSTOM_CODE="all", LMI_ADAPTER_ROOTS=str(code.parent))


def test_local_adapters_are_folders_that_are_not_hidden(tmp_path: Path) -> None:
    """Files and names with a dot are no adapters; names come in order."""
    for name in ("b", "a", ".hidden"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    (tmp_path / "adapters" / "README").write_text("")
    assert list(local_adapters(tmp_path, "adapters")) == ["a", "b"]
    assert local_adapters(tmp_path, "none") == {}
    for prefix in ("", "file:", "file://", "file://localhost"):
        assert list(local_adapters(tmp_path, f"{prefix}{tmp_path}/adapters")) == ["a", "b"]
    assert local_adapters(CAPITALS, "adapters") == {}


def test_local_files_are_bounded_like_fetched_ones(tmp_path: Path) -> None:
    """A sparse file costs its author nothing, and its reader a lot."""
    folder = copy_adapter(tmp_path / "large")
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 30)
    sources = AdapterSources({}, AdapterPolicy(max_bytes=1_000_000))
    with pytest.raises(AdapterRefusedError, match=r"at most 1000000 .*LMI_ADAPTER_MAX_SIZE"):
        sources.resolve(str(folder))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "adapter_model.bin", "model.py"])
def test_roots_confine_the_files_of_an_adapter(adapter: Path, tmp_path: Path, name: str) -> None:
    """A link inside an allowed folder led to any file of the machine."""
    inside = copy_adapter(tmp_path / "allowed" / "inside")
    (inside / name).unlink(missing_ok=True)
    (inside / name).symlink_to(adapter / name)
    with pytest.raises(AdapterRefusedError, match="LMI_ADAPTER_ROOTS"):
        resolve(inside, LMI_ADAPTER_ROOTS=str(tmp_path / "allowed"))


def test_links_within_the_roots_are_followed(tmp_path: Path) -> None:
    """As in the hub's cache; what is returned has none, so that none can be replaced later."""
    inside = copy_adapter(tmp_path / "allowed" / "inside")
    (tmp_path / "allowed" / "blob").write_bytes((inside / WEIGHTS).read_bytes())
    (inside / WEIGHTS).unlink()
    (inside / WEIGHTS).symlink_to("../blob")
    (tmp_path / "allowed" / "link").symlink_to(inside)
    (tmp_path / "roots").symlink_to(tmp_path / "allowed")
    found = resolve(tmp_path / "roots" / "link", LMI_ADAPTER_ROOTS=str(tmp_path / "roots"))
    assert Path(found) == inside.resolve()


def test_folders_of_file_systems_are_no_adapters(tmp_path: Path) -> None:
    """A volume has `lost+found`, an archive of macOS `__MACOSX`; a start must not end for them."""
    for name in ("fr", "lost+found", "__MACOSX", "__pycache__", ".hidden"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    assert list(local_adapters(tmp_path, "adapters")) == ["fr"]


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("served", ["", "{{ a }}", "{{ b }}\n"])
def test_chat_template_of_an_adapter_is_named_if_it_differs(
    adapter: Path, caplog: pytest.LogCaptureFixture, file: str, served: str
) -> None:
    """Chats with an adapter are rendered with the model's template: training saw another one."""
    text = "{{ b }}" if file.endswith("jinja") else json.dumps({"chat_template": "{{ b }}"})
    (adapter / file).write_text(text)
    AdapterSources({}, chat_template=served).resolve(str(adapter))
    assert (f"own chat template ({file})" in caplog.text) == (served.strip() != "{{ b }}")


def test_several_adapters_in_a_folder_are_named(adapter: Path, tmp_path: Path) -> None:
    """A folder of a training run has one for each checkpoint."""
    for name in ("checkpoint-1", "checkpoint-2"):
        copy_adapter(tmp_path / "run" / name, adapter)
    with pytest.raises(AdapterRefusedError, match=r"checkpoint-1/, checkpoint-2/; name one"):
        resolve(tmp_path / "run")
