"""What requests of one kind share: the frame of their events, and vLLM's parameters."""

from dataclasses import replace

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.features.token_lane import events as lane_events
from lmi_vllm.messages import GenerationJob, OpenAICall
from tests.contract.conftest import LoopThread, collect
from tests.contract.test_direct_events import CHAT, COMPLETION, TRIES, USAGE, Wire, normal, read

pytestmark = pytest.mark.vllm
PROMPT = "Once upon a time"


def test_frame_is_learnt_once_for_all_requests_of_a_shape(
    run: LoopThread, vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones have ids, times and models of their own in it, and may mean other shapes."""
    parsed: list[bytes] = []
    parse = lane_events._text_field
    monkeypatch.setattr(
        lane_events, "_text_field", lambda event: parsed.append(event) or parse(event)
    )
    lane = vllm_engine._llm.output_processor.lane  # type: ignore[attr-defined]
    monkeypatch.setattr(lane, "_frames", lane_events.EventFrames())
    for kind, base in (("completions", COMPLETION), ("chat/completions", CHAT)):
        for more, requests in ((USAGE, "ab"), ({}, 'cd"\\')):
            for number in requests:
                body = {**base, **more, "model": "lmi", "stream": True}
                call = OpenAICall(kind, body, {}, f"direct-{number}")
                for _ in range(TRIES):
                    expected, _ = normal(run(read(vllm_engine, call, None)))
                    parsed.clear()
                    found, _ = normal(run(read(vllm_engine, call, wire := Wire())))
                    if wire.direct > 3 and found == expected:
                        break
                assert found == expected
                assert wire.direct > 3
            assert not parsed, "the last request of the shape"


FRAME = (
    b'data: {"id":"%b","object":"text_completion","created":%d,"model":"lmi","choices":'
    b'[{"index":0,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)
STRINGS = [
    b'" the"',
    b'""',
    b'"\\"text\\":\\"a\\""',
    b'"\\\\"',
    b'"%\\u0001"',
    '"\u2028é"'.encode(),
]


@pytest.mark.parametrize("first", STRINGS, ids=repr)
def test_known_frame_cuts_any_text(first: bytes) -> None:
    """Whichever text and id it was learnt from."""
    frames, shape = lane_events.EventFrames(), lane_events.shape_of("completions", {"stream": True})
    for number, text in enumerate([first, *STRINGS]):
        event = FRAME % (b'a\\"%d' % number, number, text)
        before, after = frames.cut(shape, event) or (b"", b"")
        assert before + text + after == event


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (b'"logprobs":null', b'"logprobs":{}'),
        (b'"finish_reason":null', b'"finish_reason":"stop"'),
        (b'"index":0', b'"index":1'),
        (b'"stop_reason":null', b'"stop_reason":null,"token_ids":[5]'),
        (b"]}", b'],"usage":{}}'),
        (b'"created":1', b'"created":1.5'),
    ],
)
def test_event_that_says_more_is_not_cut_by_a_known_frame(part: bytes, other: bytes) -> None:
    """It is the handler's, as where no frame is known; and so is that of an unknown release."""
    frames, shape = lane_events.EventFrames(), lane_events.shape_of("completions", {"stream": True})
    more = (FRAME % (b"a", 1, b'" a"')).replace(part, other)
    assert more.count(other) == 1
    if other != b'"created":1.5':
        assert frames.cut(shape, more) is None
    assert frames.cut(shape, FRAME % (b"a", 1, b'" a"')) is not None
    assert frames.cut(shape, more) is None


def test_jobs_that_ask_for_the_same_share_vllm_s_parameters(
    run: LoopThread, vllm_engine: Engine
) -> None:
    """A request changes nothing in them but the model's end tokens, which all requests have."""
    jobs = vllm_engine._jobs  # type: ignore[attr-defined]
    job = GenerationJob("shared", PROMPT, {"max_tokens": 5, "min_tokens": 2, "temperature": 0.0})
    params = jobs._sampling_params(job)
    answers = [run(collect(vllm_engine, job))[-1].text for _ in range(2)]
    assert answers[0] == answers[1]
    assert jobs._sampling_params(replace(job, sampling=dict(job.sampling))) is params
    fresh = jobs._new_params(job)
    assert params._all_stop_token_ids <= jobs._end_ids
    fresh._all_stop_token_ids = params._all_stop_token_ids
    assert params == fresh
    for other in (
        replace(job, is_streaming=True),
        replace(job, apply_model_defaults=True),
        replace(job, sampling={**job.sampling, "min_tokens": True}),
        replace(job, sampling={**job.sampling, "stop": ["a"]}),
    ):
        assert jobs._sampling_params(other) is not params
    lists = replace(job, sampling={**job.sampling, "stop": ["a"]})
    assert jobs._sampling_params(lists) is not jobs._sampling_params(lists)
