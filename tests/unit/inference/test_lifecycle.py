import pytest

from lmi_vllm.errors import NotReadyError
from lmi_vllm.inference.lifecycle import DRAIN_RETRY_SECONDS, Lifecycle, State
from lmi_vllm.inference.start_progress import Phase


def lifecycle(state: State) -> Lifecycle:
    """Return the lifecycle of the model m in that state."""
    made = Lifecycle("m")
    made.set_state(state)
    return made


@pytest.mark.parametrize("phase", Phase, ids=str)
def test_lifecycle_ping_names_phase_while_pending(phase: Phase) -> None:
    """Before the first token /ping is 503 with the phase and the time since start."""
    pending = lifecycle(State.PENDING)
    pending.start.enter(phase)
    status, body = pending.ping()
    assert (status, list(body["m"])) == (503, ["status", "phase", "elapsed_seconds"])
    assert (body["m"]["status"], body["m"]["phase"]) == ("PENDING", str(phase))
    assert body["m"]["elapsed_seconds"] >= 0


def test_lifecycle_ping_shows_download_until_next_phase() -> None:
    """A download's numbers are shown in its phase only."""
    pending = lifecycle(State.PENDING)
    pending.start.enter(Phase.DOWNLOAD)
    pending.start.report({"files": 1, "files_total": 2})
    assert pending.ping()[1]["m"]["files_total"] == 2
    pending.start.enter(Phase.ENGINE)
    assert "files" not in pending.ping()[1]["m"]


PINGS = {
    State.HEALTHY: (200, {"m": {"status": "Healthy"}}),
    State.ASLEEP: (503, {"m": {"status": "Asleep"}}),
    State.FAILED: (503, {"m": {"status": "FAILED"}}),
    State.DRAINING: (503, {"m": {"status": "DRAINING"}}),
}


@pytest.mark.parametrize(("state", "answer"), PINGS.items(), ids=str)
def test_lifecycle_ping_in_each_state(state: State, answer: tuple[int, object]) -> None:
    """Only a healthy model is 200; no state but PENDING says more than its name."""
    assert lifecycle(state).ping() == answer


def test_lifecycle_ping_without_model_is_empty() -> None:
    """A server started without a model is well."""
    empty = lifecycle(State.PENDING)
    empty.remove_model()
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
def test_lifecycle_moves(moves: list[State], end: State) -> None:
    """Draining and failed are final."""
    made = lifecycle(State.PENDING)
    for state in moves:
        made.set_state(state)
    assert made.state is end


@pytest.mark.parametrize(
    ("before", "after"),
    [(State.HEALTHY, State.ASLEEP), (State.DRAINING, State.DRAINING), (State.FAILED, State.FAILED)],
)
def test_lifecycle_follows_an_engine_that_sleeps(before: State, after: State) -> None:
    """Only a healthy one, and back; a draining server does not come back with its engine."""
    made = lifecycle(before)
    made.set_asleep(is_asleep=True)
    assert made.state is after
    made.set_asleep(is_asleep=False)
    assert made.state is before


REFUSALS = {
    State.PENDING: ("settings phase", 5),
    State.FAILED: ("engine has failed", 5),
    State.DRAINING: ("draining", DRAIN_RETRY_SECONDS),
}


@pytest.mark.parametrize(("state", "refusal"), REFUSALS.items(), ids=str)
def test_lifecycle_refuses_unless_healthy(state: State, refusal: tuple[str, int]) -> None:
    """The refusal says why and when to come back."""
    with pytest.raises(NotReadyError, match=refusal[0]) as caught:
        lifecycle(state).check_ready()
    assert caught.value.retry_after_seconds == refusal[1]


@pytest.mark.parametrize(("name", "said"), [("model", "The model is"), ("m", "Model m is")])
def test_refusal_of_the_default_name_is_a_sentence(name: str, said: str) -> None:
    """SageMaker's folder is /opt/ml/model: `Model model is asleep`."""
    made = Lifecycle(name)
    for state in (State.PENDING, State.ASLEEP, State.DRAINING):
        made.set_state(state)
        with pytest.raises(NotReadyError, match=f"^{said} "):
            made.check_ready()
        made.check_ready((state,))


def test_phases_add_up_also_where_a_start_comes_back_to_one() -> None:
    """Their seconds, the running one's included; a restart begins at 0."""
    clock = [100.0]
    made = Lifecycle(now=lambda: clock[0])
    for phase in (Phase.ENGINE, Phase.ENGINE, Phase.ADAPTERS, Phase.ENGINE):
        clock[0] += 2
        made.start.enter(phase)
    clock[0] += 3
    expected = {Phase.SETTINGS: 2.0, Phase.ENGINE: 7.0, Phase.ADAPTERS: 2.0}
    assert made.start.phase_seconds == expected
    assert made.start.engine_seconds == 9.0  # model_loading_timeout goes on
    made.set_state(State.HEALTHY)
    clock[0] += 50
    assert made.start.phase_seconds == expected
    made.begin_restart()
    clock[0] += 1
    assert sum(made.start.phase_seconds.values()) == 1.0


def test_lifecycle_of_a_registered_model_is_fine_while_it_loads() -> None:
    """A server that waits for models is healthy also while one loads, and without one again."""
    made = lifecycle(State.HEALTHY)
    made.remove_model()
    made.begin_registered()
    assert (made.state, made.ping()[0]) == (State.PENDING, 200)
    made.remove_model()
    assert made.ping() == (200, {})


def test_lifecycle_hides_a_failure_where_asked() -> None:
    """SERVING_HEALTH_CHECK_OVERRIDE: `/ping` stays 200, requests are refused."""
    made = lifecycle(State.HEALTHY)
    made.expect_model("m", hides_failure=True)
    made.set_state(State.FAILED)
    assert made.ping() == (200, {"m": {"status": "FAILED"}})
    with pytest.raises(NotReadyError):
        made.check_ready()


def test_lifecycle_notifies_its_subscribers() -> None:
    """Each change of the state, and none that is refused."""
    made, seen = lifecycle(State.HEALTHY), []
    made.on_state.append(seen.append)
    for state in (State.UNHEALTHY, State.DRAINING, State.HEALTHY):
        made.set_state(state)
    assert seen == [State.UNHEALTHY, State.DRAINING]


def test_restart_says_what_is_left_by_the_last_one() -> None:
    """The first start, which imports vLLM, is no measure; nor is one that failed."""
    clock = [100.0]
    model = Lifecycle("m", now=lambda: clock[0])

    def left(*, after: float, end: State) -> object:
        clock[0] += after
        shown = model.ping()[1]["m"].get("seconds_left")
        clock[0] += 1
        model.set_state(end)
        return shown

    assert left(after=50, end=State.HEALTHY) is None
    model.begin_waking(is_start=True)
    assert left(after=9, end=State.PENDING) is None
    model.begin_restart()
    assert left(after=7, end=State.HEALTHY) is None
    model.begin_waking(is_start=True)
    assert left(after=2, end=State.HEALTHY) == 6.0
    model.begin_waking(is_start=True)
    assert left(after=5, end=State.HEALTHY) is None


def test_waking_without_a_start_has_no_phases() -> None:
    """An engine that was kept needs seconds; its last start is no part of them."""
    model = lifecycle(State.HEALTHY)
    model.fall_asleep()
    assert model.ping()[0] == 200
    model.begin_waking(is_start=False)
    status, body = model.ping()
    assert (status, list(body["m"])) == (200, ["status", "seconds"])


def test_mirror_says_nothing_of_a_start_that_it_does_not_see() -> None:
    """The start is the first process's: phase and seconds here are those of this process."""
    mirror = Lifecycle("m")
    mirror.mirror(State.PENDING, has_model=True)
    with pytest.raises(NotReadyError, match=r"^Model m is not ready: its engine starts$"):
        mirror.check_ready()
