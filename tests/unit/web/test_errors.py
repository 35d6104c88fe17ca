import pytest
from aiohttp import web

from lmi_vllm.errors import (
    BadParameterError,
    Dialect,
    EngineDeadError,
    Fault,
    LmiError,
    MethodNotAllowedError,
    NotReadyError,
    PayloadError,
    PayloadTooLargeError,
    ResourceNotFoundError,
    StatusTable,
    UnauthorizedError,
)
from lmi_vllm.web.errors import error_response, from_http_exception

PRETTY = b'{\n  "code": 424,\n  "type": "BadRequestException",\n  "message": "\xc3\xa9"\n}\n'
# The same fault in every dialect, byte for byte.
DIALECTS = {
    Dialect.SERVER: (424, PRETTY),
    Dialect.LMI: (424, b'{"error":"\xc3\xa9","code":424}\n'),
    Dialect.OPENAI: (
        400,
        b'{"error":{"message":"\xc3\xa9","type":"BadRequestError","param":null,"code":400}}',
    ),
    Dialect.TGI: (422, b'{"error":"\xc3\xa9","error_type":"validation"}'),
}


@pytest.mark.parametrize(("dialect", "answer"), DIALECTS.items(), ids=str)
def test_web_errors_one_fault_in_each_dialect(dialect: Dialect, answer: tuple[int, bytes]) -> None:
    """The route dialect decides status and body."""
    response = error_response(PayloadError("é"), dialect)
    assert (response.status, response.body) == answer
    assert response.content_type == "application/json"


def test_web_errors_engine_death_has_message_too() -> None:
    """Upstream's clients look for `message`, ours for `error`: a dead engine says both."""
    response = error_response(EngineDeadError(), Dialect.LMI)
    assert response.body == (
        b'{"error":"Inference Engine Failure","code":500,"message":"Inference Engine Failure"}\n'
    )


@pytest.mark.parametrize("dialect", Dialect, ids=str)
def test_web_errors_retry_after_in_each_dialect(dialect: Dialect) -> None:
    """A retry that may succeed gets a Retry-After."""
    response = error_response(NotReadyError("x", retry_after_seconds=7), dialect)
    assert (response.status, response.headers["Retry-After"]) == (503, "7")
    assert "Retry-After" not in error_response(PayloadError("x"), dialect).headers


@pytest.mark.parametrize("dialect", Dialect, ids=str)
def test_web_errors_unauthorized_asks_for_key(dialect: Dialect) -> None:
    """A missing key is 401 with the header that says how to bring one."""
    response = error_response(UnauthorizedError(), dialect)
    assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("dialect", Dialect, ids=str)
def test_web_errors_text_that_cannot_be_encoded(dialect: Dialect) -> None:
    """A client's broken bytes in a message become question marks."""
    assert b"a?b" in (error_response(PayloadError("a\udcffb"), dialect).body or b"")


def test_web_errors_configured_status_is_in_body_too() -> None:
    """A configured code replaces ours in the status line and in the body."""
    error, statuses = BadParameterError("x"), StatusTable({Fault.BAD_PARAMETER: 422})
    response = error_response(error, Dialect.SERVER, statuses)
    assert response.status == 422
    assert b'"code": 422' in (response.body or b"")
    assert error_response(error, Dialect.OPENAI, statuses).status == 400


FOREIGN: dict[str, tuple[web.HTTPException, type[LmiError]]] = {
    "not found": (web.HTTPNotFound(), ResourceNotFoundError),
    "method": (web.HTTPMethodNotAllowed("PUT", ["GET"]), MethodNotAllowedError),
    "too large": (web.HTTPRequestEntityTooLarge(5), PayloadTooLargeError),
    "anything else": (web.HTTPBadRequest(reason="odd"), BadParameterError),
}


@pytest.mark.parametrize(("error", "ours"), FOREIGN.values(), ids=FOREIGN)
def test_web_errors_of_aiohttp_become_ours(error: web.HTTPException, ours: type[LmiError]) -> None:
    """What aiohttp raises while routing or reading is answered as our own errors are."""
    assert type(from_http_exception(error, 5)) is ours
