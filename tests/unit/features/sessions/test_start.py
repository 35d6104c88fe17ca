"""Where sessions lie as the settings ask for it, and what becomes of them when the server ends."""

import os
from pathlib import Path

import pytest

from lmi_vllm.features.sessions import start
from lmi_vllm.features.sessions.start import SessionStep, keeping_sessions, sessions_of
from lmi_vllm.sources.trusted_folders import per_user_sibling
from tests.support.assembled import load_settings, model_context
from tests.unit.config.test_option_tables import Row, check_row
from tests.unit.conftest import OTHER_USER, ExplainRun, of_other_user

ROWS = (
    Row("enable_stateful_sessions", "FALSE", server={"enable_stateful_sessions": False}),
    Row("sessions_path", "/tmp/s", server={"sessions_path": "/tmp/s"}),
    Row("sessions_expiration", "60", server={"sessions_expiration": 60}),
    Row("sessions_s3url", "s3://b/p", server={"sessions_s3url": "s3://b/p"}),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_becomes_the_specified_argument(row: Row, explained: ExplainRun) -> None:
    """The options of sessions."""
    check_row(row, explained)


@pytest.mark.parametrize(
    ("url", "warnings"), [("s3://b/p", 0), ("gs://b/p", 0), ("ftp://b/p", 1), ("/p", 1)]
)
def test_unknown_store_scheme_is_a_warning(explained: ExplainRun, url: str, warnings: int) -> None:
    """Sessions would stay each server's own."""
    found = explained("", {"OPTION_SESSIONS_S3URL": url})
    assert (
        len([text for text in found.warnings if f"{url} is no URL of a store" in text]) == warnings
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")
def test_sessions_leave_a_folder_of_another_user(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the default only; the one that is set is used with a warning."""
    on = {"OPTION_ENABLE_STATEFUL_SESSIONS": "true"}
    taken = of_other_user(scratch / "taken")
    settings = load_settings({**on, "OPTION_SESSIONS_PATH": str(taken)})
    assert sessions_of(settings).root == taken
    assert f"user {OTHER_USER}" in caplog.text
    monkeypatch.setattr(os, "access", lambda path, _: str(path) != "/dev/shm")
    default = scratch / "djl_sessions"
    assert sessions_of(load_settings(on)).root == default
    os.chown(default, OTHER_USER, OTHER_USER)
    assert sessions_of(load_settings(on)).root == per_user_sibling(default)


@pytest.mark.parametrize(("is_first", "copies"), [(True, 1), (False, 0)])
async def test_sessions_are_copied_once_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool, copies: int
) -> None:
    """By the first process, to where the settings of the model say."""
    seen: list[tuple[Path, str]] = []

    def upload(folder: Path, url: str, *_: object) -> int:
        seen.append((folder, url))
        return 0

    monkeypatch.setattr(start, "upload_directory", upload)
    brought = {"OPTION_SESSIONS_PATH": str(tmp_path), "OPTION_SESSIONS_S3URL": "s3://b/p"}
    model = model_context(load_settings(brought), is_first=is_first)
    await model.enter([keeping_sessions])
    (check,) = model.steps.checks
    step = check.__self__  # type: ignore[attr-defined]
    assert isinstance(step, SessionStep)
    assert step.sessions.root == tmp_path
    for end in model.on_drained:
        await end()
    await model.leave()
    assert model.on_drained == []
    assert seen == [(tmp_path, "s3://b/p")] * copies
