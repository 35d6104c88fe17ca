"""What says when a workaround may go, for those that no other test speaks of."""

import os

import pytest

from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.workarounds import WORKAROUNDS, Scope

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")


def test_plain_vllm_starts_a_process_to_inspect_a_model_class() -> None:
    """Ours looks at it in this process: no pid but our own."""
    from vllm.model_executor.models import registry  # noqa: PLC0415

    assert registry._run_in_subprocess(os.getpid) != os.getpid()
    with workarounds.apply(Scope.CONFIGURATION):
        assert registry._run_in_subprocess(os.getpid) == os.getpid()
    assert registry._run_in_subprocess(os.getpid) != os.getpid()


@pytest.mark.parametrize("scope", Scope)
def test_every_workaround_can_be_applied_and_undone(scope: Scope) -> None:
    """On the installed release each name is there, is replaced, and is as before afterwards."""
    rows = [row for row in WORKAROUNDS if row.scope is scope]
    before = [workarounds.current(row.target) for row in rows]
    with workarounds.apply(scope):
        during = [workarounds.current(row.target) for row in rows]
    assert all(was is not now for was, now in zip(before, during, strict=True))
    after = [workarounds.current(row.target) for row in rows]
    assert all(was == now for was, now in zip(before, after, strict=True))


def test_a_release_with_the_fix_is_left_alone() -> None:
    """A row ends by its release; builds of a release count as that release."""
    assert not workarounds.is_affected("vllm", "0.31")
    assert workarounds.is_affected("vllm", "99.0")
    assert workarounds.is_affected("vllm", "")


@pytest.mark.parametrize(("release", "expected"), [("0.32.0", True), ("0.33.0+cpu", False)])
def test_zero_adapter_is_for_the_releases_with_its_defect(
    monkeypatch: pytest.MonkeyPatch, release: str, expected: bool
) -> None:
    """From 0.33 on a worker of the user's own keeps base rows apart, and every slot is theirs."""
    monkeypatch.setattr("vllm.__version__", release)
    assert workarounds.is_needed("zero_adapter") == expected
