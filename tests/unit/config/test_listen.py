"""Addresses and keys become a plan, or an error before any port opens."""

from pathlib import Path

import pytest

from lmi_vllm.assembly import configuration
from lmi_vllm.config.listen import (
    LOOK_SECONDS,
    ListenAddress,
    ListenPlan,
    RenewedKeys,
    api_keys,
    listen_plan,
)
from lmi_vllm.config.other_servers.as_settings import from_flags
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.errors import StartupError
from tests.support.assembled import load_settings

HERE = "127.0.0.1"
PLANS = {
    "default": ({}, ListenPlan(ListenAddress("http", HERE, 8080))),
    "same address": (
        {"SERVING_MANAGEMENT_ADDRESS": "http://127.0.0.1:8080"},
        ListenPlan(ListenAddress("http", HERE, 8080)),
    ),
    "two": (
        {"SERVING_MANAGEMENT_ADDRESS": "127.0.0.1"},
        ListenPlan(ListenAddress("http", HERE, 8080), ListenAddress("http", HERE, 8081)),
    ),
    "platform port": (
        {"SAGEMAKER_BIND_TO_PORT": "9", "SERVING_MANAGEMENT_ADDRESS": "http://[::1]:10"},
        ListenPlan(ListenAddress("http", HERE, 9), ListenAddress("http", "::1", 10)),
    ),
    "unix": (
        {"SERVING_INFERENCE_ADDRESS": "unix:/run/s"},
        ListenPlan(ListenAddress("unix", path="/run/s")),
    ),
    "unix, but the platform wants a port": (
        {"SERVING_INFERENCE_ADDRESS": "unix:/run/s", "SAGEMAKER_BIND_TO_PORT": "9"},
        ListenPlan(ListenAddress("http", HERE, 9)),
    ),
}


@pytest.mark.parametrize(("environ", "plan"), PLANS.values(), ids=PLANS)
def test_listen_plan(environ: dict[str, str], plan: ListenPlan) -> None:
    """What is configured is what opens; left out ports are upstream's."""
    settings = load_settings(environ)
    assert settings.errors == ()
    assert listen_plan(settings.server) == plan


FAULTS = {
    "one port, two schemes": (
        {"SERVING_MANAGEMENT_ADDRESS": "https://127.0.0.1:8080"},
        "share a port but not",
    ),
    "no such port": ({"SERVING_MANAGEMENT_ADDRESS": "http://a:99999"}, "between 0 and 65535"),
}


@pytest.mark.parametrize(("environ", "said"), FAULTS.values(), ids=FAULTS)
def test_listen_faults_are_start_up_errors(environ: dict[str, str], said: str) -> None:
    """Plain text, or another port, is never served by mistake."""
    assert any(said in error for error in load_settings(environ).errors)


def test_listen_plan_flag_beats_unix() -> None:
    """`--port 0` asks for a port, also over a socket path."""
    settings = load_settings({"SERVING_INFERENCE_ADDRESS": "unix:/s"}, CommandLine(port=0))
    assert listen_plan(settings.server).inference == ListenAddress("http", HERE, 0)


FLAGS = {
    "a port that is too large": (
        CommandLine(port=70000),
        "--port=70000 cannot be used: a port between 0 and 65535 is needed",
    ),
    "a negative port": (
        CommandLine(host="0.0.0.0", port=-5),
        "--port=-5 cannot be used: a port between 0 and 65535 is needed",
    ),
    "a host with a path": (
        CommandLine(host="here/there"),
        "--host=here/there cannot be used: a host name or an IP address is needed",
    ),
}


@pytest.mark.parametrize(("flags", "error"), FLAGS.values(), ids=FLAGS)
def test_flags_that_name_no_address_are_refused(flags: CommandLine, error: str) -> None:
    """No other port opens instead."""
    assert load_settings({}, flags).errors == (error,)


def test_console_setting_is_one_of_three() -> None:
    """Anything else is an error that says what is allowed."""
    (error,) = load_settings({"LMI_CONSOLE": "maybe"}).errors
    assert "LMI_CONSOLE" in error
    assert "auto" in error


def test_every_place_of_a_key_counts(tmp_path: Path) -> None:
    """Also the name that `vllm serve` reads, and each line of a file."""
    file = tmp_path / "keys"
    file.write_text("third\n\n fourth \n")
    environ = {"LMI_API_KEY": "first\n", "VLLM_API_KEY": "second", "LMI_API_KEY_FILE": str(file)}
    assert api_keys(load_settings(environ).server) == ("first", "second", "third", "fourth")
    environ = {"LMI_API_KEY": "first\nsecond"}
    assert api_keys(load_settings(environ).server) == ("first", "second")


KEYS = {  # variables, the flag, the keys that open the server, what is named as unused
    "flag": ({"LMI_API_KEY": "own", "VLLM_API_KEY": "v"}, ["flag"], ("flag",), ()),
    "flag beside vllm's": ({"VLLM_API_KEY": "v"}, ["flag"], ("flag",), ()),
    "flag beside aws'": ({"SM_VLLM_API_KEY": "aws", "VLLM_API_KEY": "v"}, ["flag"], ("flag",), ()),
    "aws' beside vllm's": (
        {"SM_VLLM_API_KEY": "aws", "VLLM_API_KEY": "v"}, [], ("aws",), ("VLLM_API_KEY",)
    ),
    "ours beside aws'": (
        {"SM_VLLM_API_KEY": "aws", "LMI_API_KEY": "own", "VLLM_API_KEY": "v"}, [], ("own", "v"),
        ("SM_VLLM_API_KEY",),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("environ", "flag", "opens", "unused"), KEYS.values(), ids=KEYS)
def test_the_first_key_counts_as_in_vllm(
    environ: dict[str, str], flag: list[str], opens: tuple[str, ...], unused: tuple[str, ...]
) -> None:
    """`--api-key` hides VLLM_API_KEY, as in vLLM; a variable of ours comes before an image's.

    What a variable hides is a warning. What a flag hides is in the note of `explain`.
    """
    options = configuration().options
    line = CommandLine(
        vllm=from_flags([part for key in flag for part in ("--api-key", key)], options)
    )
    settings = load_settings(environ, line)
    assert api_keys(settings.server) == opens
    assert all(any(name in one for one in settings.warnings) for name in unused)
    assert len([one for one in settings.warnings if "API_KEY" in one]) == len(unused)
    note = settings.server.details.lmi_api_key.note
    assert all(name in note for name in environ.keys() - {"LMI_API_KEY"} if flag or name in unused)
    assert not any(text in f"{note}{settings.warnings}" for text in ("aws'", "=v", "=own"))


def test_variables_of_ours_count_before_those_of_images() -> None:
    """Each kind of name: a variable as a whole, and one of SERVING_*."""
    environ = {"LMI_FRONTEND_PROCESSES": "1", "SM_VLLM_API_SERVER_COUNT": "2"}
    settings = load_settings(
        environ | {"SERVING_SHUTDOWN_TIMEOUT": "9", "SM_VLLM_SHUTDOWN_TIMEOUT": "3"}
    )
    assert (settings.server.lmi_frontend_processes, settings.server.shutdown_timeout) == (1, 9)
    assert {one.partition(" is not used")[0] for one in settings.warnings} == {
        "shutdown_timeout=3 (SM_VLLM_SHUTDOWN_TIMEOUT)",
        "LMI_FRONTEND_PROCESSES=2 (SM_VLLM_API_SERVER_COUNT)",
    }


@pytest.mark.parametrize("text", ["", " ", "\n"])
@pytest.mark.parametrize(
    "name", ["LMI_API_KEY", "VLLM_API_KEY", "LMI_API_KEY_FILE", "LMI_ADAPTER_ROOTS"]
)
def test_empty_secret_is_an_error(name: str, text: str) -> None:
    """A deployment that lost its secret opened the server."""
    (error,) = load_settings({name: text}).errors
    assert error.startswith(f"{name} is empty")
    assert not load_settings({}).errors


def test_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    """Editors on Windows write one; with it the first key matched no request."""
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n", encoding="utf-8-sig")
    server = load_settings({"LMI_API_KEY_FILE": str(file)}).server
    assert api_keys(server) == ("first", "second")


def test_none_is_a_key_like_others() -> None:
    """What unsets an option opens no server, and no folder."""
    server = load_settings({"LMI_API_KEY": "None", "LMI_ADAPTER_ROOTS": "None"}).server
    assert (api_keys(server), server.lmi_adapter_roots) == (("None",), "None")


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff", b"\xef\xbb\xbf"])
def test_file_without_a_key_ends_the_start(tmp_path: Path, content: bytes | None) -> None:
    """Missing, empty or unreadable as text."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match="LMI_API_KEY_FILE"):
        api_keys(load_settings({"LMI_API_KEY_FILE": str(file)}).server)


def test_keys_are_those_that_the_file_has_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that has left it opens nothing, and its number, by which answers are kept, is no other's.

    A file that is gone or empty leaves the earlier keys: the server is never open.
    """
    file, now = tmp_path / "keys", [0.0]

    def write(text: str) -> None:
        other = tmp_path / "other"
        other.write_text(text)
        other.rename(file)  # as Kubernetes renews a Secret
        now[0] += LOOK_SECONDS

    write("first\nsecond\n")
    server = load_settings({"LMI_API_KEY": "own", "LMI_API_KEY_FILE": str(file)}).server
    keys = RenewedKeys(server, lambda: now[0])
    assert keys() == ((0, "own"), (1, "first"), (2, "second"))
    write("third\nsecond\n")
    assert keys() == ((0, "own"), (3, "third"), (2, "second"))
    for broken in ("", " \n"):
        write(broken)
        assert keys() == ((0, "own"), (3, "third"), (2, "second"))
    file.unlink()
    now[0] += LOOK_SECONDS
    assert len(keys()) == 3
    assert "LMI_API_KEY_FILE" in caplog.text
    assert "the earlier keys count" in caplog.text
    write("first\n")
    assert keys() == ((0, "own"), (1, "first"))
    assert not [key for key in ("first", "second", "third") if key in caplog.text]


def test_file_of_keys_is_looked_at_once_a_second(tmp_path: Path) -> None:
    """Not at every request."""
    file, now = tmp_path / "keys", [0.0]
    file.write_text("first")
    keys = RenewedKeys(load_settings({"LMI_API_KEY_FILE": str(file)}).server, lambda: now[0])
    file.write_text("another")
    assert keys() == ((0, "first"),)
    now[0] = LOOK_SECONDS
    assert keys() == ((1, "another"),)
