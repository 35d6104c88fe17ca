import pytest

from lmi_vllm.errors import DEFAULT_STATUSES, Dialect, LmiError
from lmi_vllm.features.scripted.engine import Fail, Step
from lmi_vllm.inference.pipeline import dispatch
from lmi_vllm.inference.request.lmi import LmiRequest, parse_lmi_request
from lmi_vllm.inference.response.formatters import (
    StreamFormatter,
    choose_framing,
    choose_schema,
    encode_results,
    format_result,
    rank_candidates,
)
from lmi_vllm.messages import GenerationChunk
from tests.golden.cases import Golden, load_golden


def is_generation(case: Golden) -> bool:
    """Whether the payload parser and the formatters alone make the answer."""
    is_json = case.headers["Content-Type"] == "application/json"
    return bool(case.script) and case.status == 200 and is_json


def stream_bytes(case: Golden, request: LmiRequest) -> bytes:
    """Return all rows of the case's script."""
    schema = choose_schema(case.profile, case.tgi_route)
    dialect = Dialect.TGI if case.profile.tgi_compat else Dialect.LMI
    default = None if case.tgi_route else case.profile.output_formatter
    accept = case.headers.get("Accept", "")
    framing = choose_framing(accept, default, tgi_compat=case.profile.tgi_compat)
    formatter = StreamFormatter(request, request.prompts[0], schema, framing)

    def row(step: Step) -> bytes:
        if isinstance(step, Fail):
            error: LmiError = step.error
            return formatter.error(error.text, DEFAULT_STATUSES.of(error, dialect))
        assert isinstance(step, GenerationChunk)
        return formatter.rows(step)

    return b"".join(map(row, case.script))


def whole_bytes(case: Golden, request: LmiRequest) -> bytes:
    """Return the body that the case's candidates make."""
    schema = choose_schema(case.profile, case.tgi_route)
    chunks = [step for step in case.script if isinstance(step, GenerationChunk)]
    ranked = rank_candidates(chunks, request.candidates)
    results = [format_result(request, prompt, ranked, schema) for prompt in request.prompts]
    return encode_results(results, is_list=request.is_list, schema=schema)


def made_bytes(case: Golden) -> bytes:
    """Return what payload rules and formatters make of the case."""
    assert dispatch(case.payload) == "generation"
    request = parse_lmi_request(case.payload, case.profile, case.tgi_route)
    made = stream_bytes if request.is_streaming else whole_bytes
    return made(case, request)


@pytest.mark.parametrize(
    "case", list(filter(is_generation, load_golden())), ids=lambda case: case.name
)
def test_golden_rows_are_exact(case: Golden) -> None:
    """Payload rules and formatters alone give the bytes that the server sends."""
    assert made_bytes(case) == case.body
