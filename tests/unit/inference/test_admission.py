import asyncio

import pytest

from lmi_vllm.errors import NotReadyError, OverloadError
from lmi_vllm.inference.admission import DRAIN_RETRY_SECONDS, Admission, Phase, State


def admission(state: State = State.HEALTHY, limit: int = 2) -> Admission:
    """Return an admission of the model m in that state."""
    made = Admission()
    made.model_name, made.limit = "m", limit
    made.become(state)
    return made


@pytest.mark.parametrize("phase", Phase, ids=str)
def test_admission_ping_names_phase_while_pending(phase: Phase) -> None:
    """Before the first token /ping is 503 with the phase and the time since start."""
    pending = admission(State.PENDING)
    pending.enter_phase(phase)
    status, body = pending.ping()
    assert (status, list(body["m"])) == (503, ["status", "phase", "elapsed_seconds"])
    assert (body["m"]["status"], body["m"]["phase"]) == ("PENDING", str(phase))
    assert body["m"]["elapsed_seconds"] >= 0


def test_admission_ping_shows_download_until_next_phase() -> None:
    """A download's numbers are shown in its phase only."""
    pending = admission(State.PENDING)
    pending.enter_phase(Phase.DOWNLOAD)
    pending.report_progress({"files": 1, "files_total": 2})
    assert pending.ping()[1]["m"]["files_total"] == 2
    pending.enter_phase(Phase.ENGINE)
    assert "files" not in pending.ping()[1]["m"]


PINGS = {
    State.HEALTHY: (200, {"m": {"status": "Healthy"}}),
    State.FAILED: (503, {"m": {"status": "FAILED"}}),
    State.DRAINING: (503, {"m": {"status": "DRAINING"}}),
}


@pytest.mark.parametrize(("state", "answer"), PINGS.items(), ids=str)
def test_admission_ping_in_each_state(state: State, answer: tuple[int, object]) -> None:
    """Only a healthy model is 200; no state but PENDING says more than its name."""
    assert admission(state).ping() == answer


def test_admission_ping_without_model_is_empty() -> None:
    """A server started without a model is well."""
    empty = admission(State.PENDING)
    empty.has_model = False
    assert empty.ping() == (200, {})


MOVES = {
    "start": ([State.HEALTHY], State.HEALTHY),
    "drain": ([State.HEALTHY, State.DRAINING], State.DRAINING),
    "no way back from draining": ([State.DRAINING, State.HEALTHY], State.DRAINING),
    "fail while draining": ([State.DRAINING, State.FAILED], State.FAILED),
    "failed stays": ([State.FAILED, State.HEALTHY, State.DRAINING, State.PENDING], State.FAILED),
    "restart": ([State.HEALTHY, State.PENDING, State.HEALTHY], State.HEALTHY),
}


@pytest.mark.parametrize(("moves", "end"), MOVES.values(), ids=MOVES)
def test_admission_moves(moves: list[State], end: State) -> None:
    """Draining and failed are final."""
    made = admission(State.PENDING)
    for state in moves:
        made.become(state)
    assert made.state is end


async def test_admission_limit_refuses_one_more_only() -> None:
    """Above the limit a request is refused, and what is in flight is not touched."""
    made = admission()
    with made.admit(), made.admit():
        with pytest.raises(OverloadError, match=r"^Worker queue capacity exceeded for model: m$"):
            made.admit().__enter__()
        assert made.in_flight == 2
    with made.admit():
        assert made.in_flight == 1
    assert made.in_flight == 0


async def test_admission_counts_each_element() -> None:
    """A list takes as many places as it has elements, all or none."""
    made = admission()
    with made.admit():
        with pytest.raises(OverloadError):
            made.admit(2).__enter__()
        assert made.in_flight == 1
    with made.admit(2):
        assert made.in_flight == 2


async def test_admission_place_is_given_back_on_error() -> None:
    """A request that fails leaves its place."""
    made = admission()
    with pytest.raises(ValueError, match="x"), made.admit():
        raise ValueError("x")
    assert made.in_flight == 0


REFUSALS = {
    State.PENDING: ("settings phase", 5),
    State.FAILED: ("engine has failed", 5),
    State.DRAINING: ("draining", DRAIN_RETRY_SECONDS),
}


@pytest.mark.parametrize(("state", "refusal"), REFUSALS.items(), ids=str)
def test_admission_refuses_unless_healthy(state: State, refusal: tuple[str, int]) -> None:
    """The refusal says why and when to come back."""
    with pytest.raises(NotReadyError, match=refusal[0]) as caught:
        admission(state).check_ready()
    assert caught.value.retry_after_seconds == refusal[1]


async def test_admission_waits_for_the_last_request() -> None:
    """Draining waits until nothing is in flight, or says that its time is over."""
    made = admission()
    with made.admit():
        assert not await made.wait_idle(0.01)
        waiting = asyncio.create_task(made.wait_idle(5))
    assert await waiting


async def test_admission_end_all_leaves_each_request_an_answer() -> None:
    """What a shutdown cuts off is told so; a cancellation from elsewhere is not taken back."""
    made = admission()
    begun = asyncio.Event()

    async def request() -> str:
        with made.admit():
            try:
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return str(made.shutdown_error())
        return ""

    task = asyncio.create_task(request())
    await begun.wait()
    assert made.shutdown_error() is None
    made.end_all()
    assert "shut down" in await task


def test_phases_add_up_also_where_a_start_comes_back_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their seconds, the running one's included; a restart counts anew."""
    clock = [100.0]
    monkeypatch.setattr("lmi_vllm.inference.admission.time.monotonic", lambda: clock[0])
    admission = Admission()
    for phase in (Phase.ENGINE, Phase.ENGINE, Phase.ADAPTERS, Phase.ENGINE):
        clock[0] += 2
        admission.enter_phase(phase)
    clock[0] += 3
    expected = {Phase.SETTINGS: 2.0, Phase.ENGINE: 7.0, Phase.ADAPTERS: 2.0}
    assert admission.phase_seconds == expected
    admission.become(State.HEALTHY)
    clock[0] += 50
    assert admission.phase_seconds == expected
    admission.begin_restart()
    clock[0] += 1
    assert sum(admission.phase_seconds.values()) == 1.0
