"""Sticky sessions: exact answers, expiry, and what the disk keeps (docs/sessions.md#sessions)."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.errors import RequestError
from lmi_vllm.features.sessions.sessions import Sessions
from lmi_vllm.features.sessions.start import SessionStep
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.golden.dialogues import Dialogue, load_dialogues

DIALOGUES = load_dialogues(Path(__file__).parent / "dialogues")
HEADER = "X-Amzn-SageMaker-Session-Id"
GREETING = {"inputs": "x"}
UNKNOWN = "00000000-0000-4000-8000-000000000000"
SHOWN = re.compile(r"([0-9a-f-]{36}); Expires=2030-01-02T03:24:05Z")


class Clock:
    """A clock that stands still until told otherwise."""

    def __init__(self) -> None:
        self.seconds = 1893553445.75  # 2030-01-02T03:04:05Z

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    """Return the sessions' clock."""
    return Clock()


def use(client: TestClient, sessions: Sessions) -> None:
    """Let the server behind a client keep these sessions."""
    steps = client.app[SERVICE].runtime.steps
    steps.checks.clear()
    steps.answers.clear()
    SessionStep(sessions).add_to(steps)


@pytest.fixture
async def client(serve: ServeScripted, tmp_path: Path, clock: Clock) -> TestClient:
    """Return a client of a server whose sessions are below tmp_path."""
    client = await serve()
    use(client, Sessions(tmp_path / "sessions", 1200, now=clock))
    return client


async def post(client: TestClient, body: object, session: str | None = None) -> tuple[int, str]:
    """Return status and body of a request that names a session."""
    headers = {} if session is None else {HEADER: session}
    answer = await client.post("/invocations", json=body, headers=headers)
    return answer.status, await answer.text()


async def create(client: TestClient) -> str:
    """Return the id of a new session."""
    answer = await client.post("/invocations", json={"requestType": "NEW_SESSION"})
    assert answer.status == 200
    return answer.headers[HEADER].partition(";")[0]


async def test_new_session_answers_in_exact_bytes(client: TestClient) -> None:
    """The id in body and header, its expiry in whole seconds of UTC; the header may say NEW too."""
    for headers in ({}, {HEADER: "NEW_SESSION"}):
        answer = await client.post(
            "/invocations", json={"requestType": "NEW_SESSION"}, headers=headers
        )
        found = SHOWN.fullmatch(answer.headers[HEADER])
        assert found, answer.headers[HEADER]
        assert await answer.text() == f'{{"result":"Session {found[1]} created"}}\n'
        assert answer.content_type == "application/json"


async def test_session_is_used_and_closed(client: TestClient) -> None:
    """Any payload goes with it; once closed it is unknown."""
    name = await create(client)
    assert (await post(client, GREETING, name))[0] == 200
    assert (await post(client, GREETING, f"{name}; Expires=2030-01-02T03:04:05Z"))[0] == 200
    answer = await client.post(
        "/invocations", json={"requestType": "CLOSE"}, headers={HEADER: name}
    )
    assert await answer.text() == f'{{"result":"Session {name} closed"}}\n'
    assert answer.headers["X-Amzn-SageMaker-Closed-Session-Id"] == name
    gone = (424, '{"error":"session not found","code":424}\n')
    assert await post(client, GREETING, name) == gone
    assert await post(client, {"requestType": "CLOSE"}, name) == gone


@pytest.mark.parametrize(
    ("body", "session", "text"),
    [
        (GREETING, UNKNOWN, "session not found"),
        (GREETING, "../../etc", "session not found"),
        ({"requestType": "CLOSE"}, None, "invalid session_id"),
        ({"requestType": "CLOSE"}, "", "invalid session_id"),
        ({"requestType": "CLOSE"}, UNKNOWN, "session not found"),
        (
            {"requestType": "OPEN"},
            None,
            "requestType: expected NEW_SESSION or CLOSE (got 'OPEN')",
        ),
    ],
)
async def test_session_refusals(
    client: TestClient, body: object, session: str | None, text: str
) -> None:
    """Each is a 424 with its own text."""
    expected = json.dumps({"error": text, "code": 424}, separators=(",", ":")) + "\n"
    assert await post(client, body, session) == (424, expected)


@pytest.mark.parametrize("session", [None, "", "NEW_SESSION"])
async def test_no_session_is_fine(client: TestClient, session: str | None) -> None:
    """Without an id a request has no session."""
    assert (await post(client, GREETING, session))[0] == 200


async def test_session_comes_as_custom_attribute(client: TestClient) -> None:
    """SageMaker passes on nothing else."""
    headers = {"X-Amzn-SageMaker-Custom-Attributes": f"{HEADER}={UNKNOWN}"}
    answer = await client.post("/invocations", json=GREETING, headers=headers)
    assert answer.status == 424


async def test_session_beside_a_route(client: TestClient) -> None:
    """An attribute with the route's beside it, whichever comes first, is the session's."""
    session = f"{HEADER}={UNKNOWN}"
    for attributes in (f"{session},route=/predictions/demo", f"route=/invocations,{session}"):
        headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes}
        answer = await client.post("/invocations", json=GREETING, headers=headers)
        assert (answer.status, "session not found" in await answer.text()) == (424, True)


async def test_expired_session_is_unknown_and_removed_later(
    client: TestClient, clock: Clock, tmp_path: Path
) -> None:
    """Use does not extend it; it is accepted as no session until it is removed."""
    name = await create(client)
    clock.seconds += 1199
    assert (await post(client, GREETING, name))[0] == 200
    clock.seconds += 2
    assert (await post(client, GREETING, name))[0] == 200
    assert (tmp_path / "sessions" / name).is_dir()
    other = await create(client)
    assert {path.name for path in (tmp_path / "sessions").iterdir()} == {other}
    assert (await post(client, GREETING, name))[0] == 424


async def test_sessions_come_back_from_the_disk(
    client: TestClient, clock: Clock, tmp_path: Path
) -> None:
    """A server that starts over the same directory knows them; what is no session is left alone."""
    name = await create(client)
    (tmp_path / "sessions" / "other").mkdir()
    (tmp_path / "sessions" / UNKNOWN).mkdir()
    use(client, Sessions(tmp_path / "sessions", 1200, now=clock))
    assert (await post(client, GREETING, name))[0] == 200
    assert (await post(client, GREETING, UNKNOWN))[0] == 424
    await create(client)
    assert (tmp_path / "sessions" / "other").is_dir()


async def test_session_ids_are_no_paths(client: TestClient, tmp_path: Path) -> None:
    """A file of the right shape elsewhere is no session, and CLOSE removes nothing there."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".session.json").write_text('{"expires": 9e9}')
    await create(client)
    for body in (GREETING, {"requestType": "CLOSE"}):
        assert (await post(client, body, "../elsewhere"))[0] == 424
    assert (tmp_path / "elsewhere").is_dir()


async def test_sessions_switched_off_refuse_only_their_requests(
    client: TestClient, tmp_path: Path
) -> None:
    """Requests without a session are served as ever."""
    use(client, Sessions(tmp_path, is_enabled=False))
    off = (424, '{"error":"stateful sessions not enabled","code":424}\n')
    assert await post(client, GREETING, UNKNOWN) == off
    assert await post(client, {"requestType": "NEW_SESSION"}) == off
    assert (await post(client, GREETING))[0] == 200


async def test_sessions_are_created_side_by_side(client: TestClient, tmp_path: Path) -> None:
    """Every one of them is its own."""
    names = await asyncio.gather(*(create(client) for _ in range(20)))
    assert len({*names}) == len([*(tmp_path / "sessions").iterdir()]) == 20


async def created_by(sessions: Sessions, client: str) -> str:
    """Return the id of a client's new session."""
    enter_record(RequestRecord("", "", "", "", client, ""))
    reply = await sessions.answer({"requestType": "NEW_SESSION"}, {})
    return reply.headers[HEADER].partition(";")[0]


async def test_client_with_the_most_sessions_makes_room(tmp_path: Path, clock: Clock) -> None:
    """It loses its oldest to another client, also after a restart, and gets no further one."""
    sessions = Sessions(tmp_path, 1200, now=clock, most=4)
    own = await created_by(sessions, "10.0.0.9")
    many = []
    for number in range(3):
        clock.seconds += 1
        many.append(await created_by(sessions, f"2001:db8::{number}"))
    sessions = Sessions(tmp_path, 1200, now=clock, most=4)
    with pytest.raises(RequestError, match="4 sessions already"):
        await created_by(sessions, "2001:db8::ffff")
    new = await created_by(sessions, "10.0.0.7")
    left = [(tmp_path / name).is_dir() for name in (own, new, *many)]
    assert left == [True, True, False, True, True]


class CountedReads(Sessions):
    """Sessions that know how many files they read."""

    reads = 0

    def _read(self, name: str) -> tuple[float, str] | None:
        self.reads += 1
        return super()._read(name)


async def test_new_session_reads_no_file_twice(tmp_path: Path, clock: Clock) -> None:
    """10,000 took 0.16 s for each new session, one after the other: others waited behind them."""
    sessions = CountedReads(tmp_path, 1200, now=clock)
    for _ in range(20):
        await created_by(sessions, "10.0.0.9")
    assert sessions.reads == 19
    clock.seconds += 1201  # what is remembered of them expires with them
    await created_by(sessions, "10.0.0.9")
    assert not sessions._seen


async def test_session_directory_that_cannot_be_written_is_named(
    client: TestClient, tmp_path: Path
) -> None:
    """The operator's fault: 500, naming the option."""
    (tmp_path / "file").write_text("")
    use(client, Sessions(tmp_path / "file" / "below"))
    status, text = await post(client, {"requestType": "NEW_SESSION"})
    assert (status, "sessions_path" in text) == (500, True)


@pytest.mark.parametrize("dialogue", DIALOGUES, ids=lambda dialogue: dialogue.name)
async def test_golden_dialogue_is_exact(
    serve: ServeScripted, tmp_path: Path, dialogue: Dialogue
) -> None:
    """Sessions are answered with these bytes and headers."""
    client = await serve(dialogue.profile)
    use(client, Sessions(tmp_path / "sessions"))
    await dialogue.check(client)
