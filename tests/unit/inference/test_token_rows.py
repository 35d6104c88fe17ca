"""The short way of a token to its row gives the bytes of the long one."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_vllm.inference.request.lmi import parse_lmi_request
from lmi_vllm.inference.response.formatters import (
    LMI_SCHEMA,
    TGI_ROOT_SCHEMA,
    TGI_SCHEMA,
    Schema,
    StreamFormatter,
)
from lmi_vllm.messages import (
    FRAMINGS,
    Framing,
    GeneratedToken,
    GenerationChunk,
    ServingProfile,
)

SCHEMAS = {"LMI": LMI_SCHEMA, "TGI": TGI_SCHEMA, "TGI 3": TGI_ROOT_SCHEMA}
PARAMETERS = {
    "default": {},
    "without": {"logprobs": False},
    "ranked": {"top_n_tokens": 2},
    "details": {"details": True},
}
CASES = list(itertools.product(SCHEMAS, PARAMETERS, ("jsonlines", "sse")))
TEXTS = st.text() | st.sampled_from(['"', "%", "%(id)d", "the text", "\n", "é€😀", "\x00"])


def formatter(schema: Schema, framing: Framing, parameters: object) -> StreamFormatter:
    """Return a formatter for a streamed request."""
    payload = {"inputs": "x", "stream": True, "parameters": parameters}
    profile = ServingProfile(tgi_compat=schema is not LMI_SCHEMA)
    return StreamFormatter(parse_lmi_request(payload, profile, None), "x", schema, framing)


@pytest.mark.parametrize(("schema", "parameters", "framing"), CASES)
@settings(max_examples=40)  # of each of 24 cases
@given(
    tokens=st.lists(
        st.tuples(
            st.integers(0, 2**31), TEXTS, st.none() | st.floats(-9999, 0) | st.just(-98765.4321)
        ),
        max_size=4,
    )
)
def test_token_row_is_the_row_of_the_chunk(
    schema: str, parameters: str, framing: str, tokens: list[tuple[int, str, float | None]]
) -> None:
    """Row for row the same bytes, and the last row counts and joins them, too."""
    made = [formatter(SCHEMAS[schema], FRAMINGS[framing], PARAMETERS[parameters]) for _ in range(2)]
    short, long = made
    for token, text, logprob in tokens:
        chunk = GenerationChunk(0, (GeneratedToken(token, text, logprob),), text)
        assert short.token_row(token, text, logprob) == long.rows(chunk)
    last = GenerationChunk(0, (GeneratedToken(1, "e", -1.0),), "e", "length", prompt_tokens=3)
    assert short.rows(last) == long.rows(last)
