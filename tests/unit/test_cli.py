"""The command line as a shell starts it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_vllm.cli import VERBS, drop_additions, main, parse, verb_parser
from lmi_vllm.commands.completion import script

COMMANDS = {
    "no stdout": ("explain --demo --offline >&-", 0, ""),
    "no stderr": ("partition 2>&-", 1, ""),
    "no stream": ("explain --demo --offline <&- >&- 2>&-", 0, ""),
}


@pytest.mark.parametrize(("words", "code", "printed"), COMMANDS.values(), ids=COMMANDS)
def test_a_closed_stream_swallows_what_is_printed(words: str, code: int, printed: str) -> None:
    """It changes no exit code, and nothing is printed elsewhere."""
    ended = subprocess.run(
        ["sh", "-c", f'exec "$0" -m lmi_vllm {words}', sys.executable],
        capture_output=True,
        check=False,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, printed, "")


def test_no_file_is_for_all_users_to_write() -> None:
    """Whatever the umask: models, code and state that others change would run as this user."""
    before = os.umask(0)
    try:
        with pytest.raises(SystemExit):
            main(["--version"])
        assert os.umask(0) == 0o002
        os.umask(0o077)
        with pytest.raises(SystemExit):
            main(["--version"])
        assert os.umask(0) == 0o077
    finally:
        os.umask(before)


def test_no_verb_shows_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the first thing that anyone types; no error."""
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"\n    {verb}\s", shown) for verb in VERBS)


def test_variables_are_set_before_their_library_is_imported() -> None:
    """prometheus_client chooses when it is imported whether processes share their counts."""
    code = (
        "import sys; from lmi_vllm.assembly import variables_to_serve as found; "
        "made = found({'LMI_FRONTEND_PROCESSES': '2'}, ['--max-model-len', '8']); "
        "also = found({}, ['--api-server-count', '2']); "
        "print('PROMETHEUS_MULTIPROC_DIR' in made, 'PROMETHEUS_MULTIPROC_DIR' in also, "
        "'prometheus_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False"]


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("SIGINT", "default_int_handler"),
        ("SIGINT", "SIG_IGN"),
        ("SIGTERM", "SIG_DFL"),
        ("SIGHUP", "SIG_DFL"),
    ],
)
def test_a_server_that_is_still_imported_ends_with_a_line(name: str, before: str) -> None:
    """Ctrl-C in the first second was a traceback and no exit code 0; a shell's `&` ignores it."""
    code = (
        "import os, signal; from lmi_vllm.signals import end_on_signals; "
        f"signal.signal(signal.{name}, signal.{before}); "
        f"end_on_signals(is_serving=True); os.kill(os.getpid(), signal.{name}); signal.pause()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)  # noqa: PLW1510
    assert (ended.returncode, ended.stderr) == (0, f"lmi-vllm: ended by {name}\n")


@pytest.mark.parametrize("folder", ["/nonexistent", "here"])
def test_the_metrics_folder_of_a_deployment_is_not_used(tmp_path: Path, folder: str) -> None:
    """Charts set it for vLLM's server: one that is missing ended each verb with a traceback."""
    place = str(tmp_path) if folder == "here" else folder
    environ = {"PATH": os.environ["PATH"], "PROMETHEUS_MULTIPROC_DIR": place, "HF_MODEL_ID": "a/b"}
    command = [sys.executable, "-m", "lmi_vllm", "explain"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert "HF_MODEL_ID" in done.stdout
    assert [*tmp_path.iterdir()] == []


def run_with(verb: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a verb over the embedded model."""
    return subprocess.run(
        [sys.executable, "-m", "lmi_vllm", *verb.split(), "--demo"],
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        check=False,
        text=True,
    )


def test_a_line_break_at_the_end_of_a_variable_is_dropped() -> None:
    """A Secret made of a file has one, and so has a block of YAML."""
    given = {"OPTION_ENFORCE_EAGER": "true\r\n", "HF_HUB_OFFLINE": "1\n", "OPTION_DTYPE": "auto\n"}
    ended = run_with("explain --offline", **given)
    assert ended.returncode == 0, ended.stdout
    assert "enforce_eager = true" in ended.stdout


def test_the_port_of_a_service_named_vllm_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets it in every pod beside the Service; vLLM's engine ended on it."""
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.2:8000")
    drop_additions()
    assert "VLLM_PORT" not in os.environ
    monkeypatch.setenv("VLLM_PORT", "8123")
    drop_additions()
    assert os.environ["VLLM_PORT"] == "8123"


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples_that_are_understood(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They stand below the flags, with where options are set; each is parsed as typed."""
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "Options are set by flags" in shown
    for example in VERBS[verb].examples:
        assert f"\n  {example}\n" in shown
        words = shlex.split(example.removeprefix('eval "$(').replace(')"', ""), comments=True)
        words = words[words.index("lmi-vllm") + 1 :]
        assert words[0] == verb
        assert parse(words).verb == verb


TYPED = {
    "a verb": (("ex",), "explain"),
    "our flag": (("serve", "--vllm-d"), "--vllm-defaults"),
    "a flag of vLLM's": (("serve", "acme/m", "--max-mo"), "--max-model-len"),
    "values of a flag": (("explain", "--format", ""), "table json markdown"),
    "values of a word": (("completion", "z"), "zsh"),
    "a file, which the shell completes": (("serve", "m"), ""),
    "another verb has no flags of vLLM's": (("fetch", "--max-mo"), ""),
}


@pytest.mark.parametrize(("words", "found"), TYPED.values(), ids=TYPED)
def test_completion_in_bash(words: tuple[str, ...], found: str) -> None:
    """The script is read by bash itself, which asks it as at a press of the key."""
    asked = f"COMP_WORDS=(lmi-vllm {' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words)}"
    made = script({verb: verb_parser(verb) for verb in VERBS})
    code = f'{made}\n{asked}; _lmi_vllm; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(
        ["bash", "--norc", "-uc", code], capture_output=True, check=False, text=True
    )
    assert (done.stdout, done.stderr) == (f"{found}\n", "")
