"""Secure mode: every control, forbidden with it and allowed without it."""

import json
from pathlib import Path

import pytest

from lmi_vllm.config.properties import parse_properties
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.errors import AdapterMissingError, BadParameterError
from lmi_vllm.features.secure_mode.controls import KNOWN_CONTROLS
from lmi_vllm.sources.archives import unpack
from tests.support.assembled import adapter_violations, load_settings, start_violations
from tests.support.s3_server import zip_file
from tests.unit.adapters.test_adapter_source import adapter, resolve

__all__ = ["adapter"]
ALL = ",".join(KNOWN_CONTROLS)
TEMPLATED = json.dumps({"chat_template": "{{ messages }}"})


def violations(
    *controls: str,
    properties: str = "",
    directory: Path | None = None,
    channels: str = "",
    **environ: str,
) -> tuple[str, ...]:
    """What a start in secure mode is refused for."""
    environ |= {
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": ",".join(controls) or KNOWN_CONTROLS[0],
        "SAGEMAKER_UNTRUSTED_CHANNELS": channels,
    }
    file = parse_properties(properties, "serving.properties") if properties else None
    return start_violations(load_settings(environ, extra_properties=file), environ, directory)


def test_secure_mode_off_checks_nothing(tmp_path: Path) -> None:
    """Without the switch nothing is forbidden, whatever the controls say."""
    (tmp_path / "model.py").write_text("")
    environ = {"SAGEMAKER_SECURITY_CONTROLS": ALL, "OPTION_TRUST_REMOTE_CODE": "true"}
    assert start_violations(load_settings(environ), environ, tmp_path) == ()


def test_secure_mode_needs_its_controls() -> None:
    """The switch alone ends the start, naming the variable."""
    environ = {"SAGEMAKER_SECURE_MODE": "True"}
    (text,) = start_violations(load_settings(environ), environ, None)
    assert "SAGEMAKER_SECURITY_CONTROLS" in text


def test_secure_mode_knows_its_controls() -> None:
    """A misspelt control protects nothing: it is refused, and the known ones are named."""
    (text,) = violations("DISALLOW_PICKLES")
    assert "DISALLOW_PICKLES" in text
    assert "DISALLOW_PICKLE_FILES" in text


@pytest.mark.parametrize(
    "line",
    [
        "option.tokenizer_mode=auto", "option.speculative_config={}", "option.chat_template=x",
        "option.enable_auto_tool_choice=true", "option.limit_mm_per_prompt={}", "retry_threshold=1",
        "option.no_such_option=1", "option.env=A=B",
    ],
)  # fmt: skip
def test_secure_mode_refuses_options_outside_its_list(line: str) -> None:
    """Whatever is not on the list is refused with its key and place."""
    (text,) = violations(properties=line)
    assert text.startswith(f"{line.split('=', maxsplit=1)[0]} (serving.properties line 1)")


def test_secure_mode_refuses_option_variables_outside_its_list() -> None:
    """An `OPTION_*` variable counts as much as the file."""
    (text,) = violations(OPTION_TOKENIZER_MODE="auto")
    assert "OPTION_TOKENIZER_MODE" in text


def test_secure_mode_allows_its_list_and_defaults() -> None:
    """Listed options pass, as do platform variables and our own defaults."""
    properties = (
        "option.dtype=bf16\nengine=Python\njob_queue_size=5\noption.entryPoint=djl_python.x"
    )
    assert not violations(
        *KNOWN_CONTROLS,
        properties=properties,
        OPTION_MAX_MODEL_LEN="512",
        MAX_BATCH_SIZE="4",
        PREDICT_TIMEOUT="60",
        SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS="60",
        SERVING_SHUTDOWN_TIMEOUT="5",
        HF_MODEL_ID="acme/tiny",
    )


def test_secure_mode_does_not_check_the_embedded_models_own_file() -> None:
    """`--demo` brings options that the user did not set."""
    environ = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": ALL}
    settings = load_settings(environ, CommandLine(demo=True))
    assert settings.properties is not None
    assert start_violations(settings, environ, DEMO_MODEL_DIR) == ()


@pytest.mark.parametrize("python", ["/usr/bin/python3", "/opt/djl/vllm_venv/bin/python"])
def test_secure_mode_allows_two_interpreters(python: str) -> None:
    """Upstream's two paths pass."""
    assert not violations(properties=f"option.pythonExecutable={python}")


def test_secure_mode_refuses_other_interpreters() -> None:
    """Any other path is refused, whatever the controls."""
    (text,) = violations(properties="option.pythonExecutable=/tmp/python")
    assert "/tmp/python" in text


@pytest.mark.parametrize(
    ("properties", "environ"),
    [
        ("option.trust_remote_code=true", {}),
        ("option.trust_remote_code=True", {}),
        ("", {"OPTION_TRUST_REMOTE_CODE": "true"}),
        ("", {"HF_MODEL_TRUST_REMOTE_CODE": "true"}),
        ("option.trust_remote_code=false", {"OPTION_TRUST_REMOTE_CODE": "true"}),
    ],
)
def test_secure_mode_refuses_remote_code(properties: str, environ: dict[str, str]) -> None:
    """With the control it is refused; without the control it passes."""
    (text,) = violations("DISALLOW_TRUST_REMOTE_CODE", properties=properties, **environ)
    assert "DISALLOW_TRUST_REMOTE_CODE" in text
    assert not violations("DISALLOW_PICKLE_FILES", properties=properties, **environ)
    assert not violations("DISALLOW_TRUST_REMOTE_CODE", properties="option.trust_remote_code=false")


@pytest.mark.parametrize(
    ("entry_point", "is_refused"),
    [("model.py", True), ("https://x/y.py", True), ("djl_python.lmi_vllm.vllm_async", False)],
)
def test_secure_mode_refuses_entry_points(entry_point: str, is_refused: bool) -> None:
    """Only upstream's own entry points pass under the control."""
    properties = f"option.entryPoint={entry_point}"
    found = violations("DISALLOW_CUSTOM_INFERENCE_SCRIPTS", properties=properties)
    assert bool(found) is is_refused
    assert not violations("DISALLOW_PICKLE_FILES", properties=properties)


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("model.py", "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"),
        ("requirements.txt", "DISALLOW_REQUIREMENTS_TXT"),
    ],
)
def test_secure_mode_refuses_files_of_the_model(tmp_path: Path, name: str, control: str) -> None:
    """In the model directory and in the adapters that come with it."""
    adapter = tmp_path / "adapters" / "a"
    adapter.mkdir(parents=True)
    assert violations(control, directory=tmp_path) == ()
    for place in (tmp_path, adapter):
        (place / name).write_text("")
    found = violations(control, directory=tmp_path)
    assert [text.split(" ")[0] for text in found] == [str(tmp_path / name), str(adapter / name)]
    assert all(text.endswith(control) for text in found)
    assert violations("DISALLOW_TRUST_REMOTE_CODE", directory=tmp_path) == ()


UNTRUSTED = [
    ("a/b/pytorch_model.bin", "", "DISALLOW_PICKLE_FILES"),
    ("X.PT", "", "DISALLOW_PICKLE_FILES"),
    ("x.pth", "", "DISALLOW_PICKLE_FILES"),
    ("x.ckpt", "", "DISALLOW_PICKLE_FILES"),
    (".hidden/x.Pkl", "", "DISALLOW_PICKLE_FILES"),
    ("a/tokenizer_config.json", TEMPLATED, "DISALLOW_CHAT_TEMPLATE"),
    ("tokenizer_config.json", "not json", "DISALLOW_CHAT_TEMPLATE"),
    ("processor_config.json", TEMPLATED, "DISALLOW_CHAT_TEMPLATE"),
    ("special_tokens_map.json", TEMPLATED, "DISALLOW_CHAT_TEMPLATE"),
    ("chat_template.jinja", "", "DISALLOW_CHAT_TEMPLATE"),
    ("chat_template.json", "", "DISALLOW_CHAT_TEMPLATE"),
    ("additional_chat_templates/tools.jinja", "", "DISALLOW_CHAT_TEMPLATE"),
]


@pytest.mark.parametrize(("name", "text", "control"), UNTRUSTED, ids=[row[0] for row in UNTRUSTED])
def test_secure_mode_scans_channels(tmp_path: Path, name: str, text: str, control: str) -> None:
    """Each forbidden file is found at any depth, with its control only."""
    channel = tmp_path / "channel"
    (channel / name).parent.mkdir(parents=True)
    (channel / "model.safetensors").write_text("")
    assert violations(control, channels=str(channel)) == ()
    (channel / name).write_text(text)
    (found,) = violations(control, channels=f"{channel}")
    assert found == f"{channel / name} is forbidden by {control}"
    other = next(known for known in KNOWN_CONTROLS if known != control)
    assert violations(other, channels=str(channel)) == ()
    assert violations(control, directory=channel) == (), "no channel list: files are not scanned"


def test_secure_mode_allows_a_tokenizer_without_template(tmp_path: Path) -> None:
    """A tokenizer's configuration is no template."""
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert violations("DISALLOW_CHAT_TEMPLATE", channels=str(tmp_path)) == ()


def test_secure_mode_follows_links_once(tmp_path: Path) -> None:
    """A link leads to the files behind it, and a circle comes to an end."""
    channel, other = tmp_path / "channel", tmp_path / "other"
    channel.mkdir()
    other.mkdir()
    (other / "x.bin").write_text("")
    (channel / "link").symlink_to(other)
    (other / "back").symlink_to(channel)
    found = violations("DISALLOW_PICKLE_FILES", channels=str(channel))
    assert found == (f"{channel / 'link' / 'x.bin'} is forbidden by DISALLOW_PICKLE_FILES",)


def test_secure_mode_refuses_channels_that_are_no_directories(tmp_path: Path) -> None:
    """A path that cannot be scanned is named, the others are still scanned."""
    (tmp_path / "x.bin").write_text("")
    channels = f"{tmp_path / 'missing'}, {tmp_path / 'x.bin'}, {tmp_path}"
    found = violations("DISALLOW_PICKLE_FILES", channels=channels)
    assert [text.rpartition(" is ")[2] for text in found] == [
        "not a directory", "not a directory", "forbidden by DISALLOW_PICKLE_FILES"
    ]  # fmt: skip


def test_secure_mode_names_everything_at_once(tmp_path: Path) -> None:
    """One refused start tells all that is wrong."""
    for name in ("model.py", "requirements.txt", "x.bin", "chat_template.jinja"):
        (tmp_path / name).write_text("")
    properties = (
        "option.trust_remote_code=true\noption.tokenizer_mode=auto\n"
        "option.pythonExecutable=/tmp/python\noption.entryPoint=model.py"
    )
    found = violations(
        *KNOWN_CONTROLS, properties=properties, directory=tmp_path, channels=str(tmp_path)
    )
    assert len(found) == 8, found


@pytest.mark.parametrize(
    ("name", "text", "control"),
    [
        *UNTRUSTED,
        ("model.py", "", "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"),
        ("requirements.txt", "", "DISALLOW_REQUIREMENTS_TXT"),
    ],
)
def test_secure_mode_checks_adapters(tmp_path: Path, name: str, text: str, control: str) -> None:
    """The folder of an adapter is scanned without being a channel; off means off."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    environ = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": control}
    (found,) = adapter_violations(load_settings(environ), tmp_path)
    assert found == f"{tmp_path / name} is forbidden by {control}"
    off = load_settings({**environ, "SAGEMAKER_SECURE_MODE": "false"})
    assert adapter_violations(off, tmp_path) == ()


def test_secure_mode_scans_archives_of_a_channel(tmp_path: Path) -> None:
    """A pickle inside an archive of a channel is found where it was unpacked to."""
    store, cache = tmp_path / "store", tmp_path / "cache"
    store.mkdir()
    (store / "m.zip").write_bytes(zip_file({"config.json": b"{}", "a/x.bin": b""}))
    environ = {"SERVING_MODEL_STORE": str(store), "SERVING_DOWNLOAD_DIR": str(cache)}
    folder = unpack(store / "m.zip", environ, "m.zip")
    (found,) = violations("DISALLOW_PICKLE_FILES", channels=str(store), **environ)
    assert found == f"{folder / 'a' / 'x.bin'} is forbidden by DISALLOW_PICKLE_FILES"
    other = tmp_path / "other"
    other.mkdir()
    assert violations("DISALLOW_PICKLE_FILES", channels=str(other), **environ) == ()


@pytest.mark.parametrize(
    ("control", "name"),
    [
        ("DISALLOW_PICKLE_FILES", "extra.PT"),
        ("DISALLOW_CUSTOM_INFERENCE_SCRIPTS", "model.py"),
        ("DISALLOW_REQUIREMENTS_TXT", "requirements.txt"),
        ("DISALLOW_CHAT_TEMPLATE", "chat_template.jinja"),
    ],
)
def test_secure_mode_refuses_adapters_with_forbidden_files(
    adapter: Path, control: str, name: str
) -> None:
    """In secure mode each control is a 400 naming file and control; else nothing is said."""
    (adapter / name).write_text("")
    secure = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": f"X, {control}"}
    with pytest.raises(BadParameterError, match=control):
        resolve(adapter, **secure)
    assert resolve(adapter, LMI_CUSTOM_CODE="none")


@pytest.mark.parametrize("src", ["gone", "a file"])
@pytest.mark.parametrize("roots", ["", "below"])
def test_secure_mode_refuses_what_is_no_folder(tmp_path: Path, src: str, roots: str) -> None:
    """A client's fault: reading the folder was an error of ours, 500."""
    (tmp_path / "a file").write_text("")
    environ = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": ALL}
    if roots:
        with pytest.raises(AdapterMissingError, match="is not a valid path"):
            resolve(tmp_path / src, **environ, LMI_ADAPTER_ROOTS=str(tmp_path))
    else:
        with pytest.raises(BadParameterError, match="secure mode takes adapters from"):
            resolve(tmp_path / src, **environ)
