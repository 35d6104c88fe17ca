import inspect
import re
import time

import pytest

from lmi_vllm import errors
from lmi_vllm.errors import (
    DEFAULT_STATUSES,
    Dialect,
    EngineDeadError,
    EngineFailureError,
    Fault,
    LmiError,
    NoAdapterSlotError,
    OverloadError,
    PayloadError,
    StartupError,
    UnknownAdapterError,
    openai_error,
    tgi_error,
)

CLASSES = [
    kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, LmiError)
]


def test_errors_docstring_draws_the_whole_tree() -> None:
    """The tree in the module's docstring names every class that has one level of its own."""
    drawn = set(re.findall(r"\w+Error", str(errors.__doc__)))
    assert drawn == {kind.__name__ for kind in CLASSES}


@pytest.mark.parametrize("fault", Fault, ids=str)
def test_errors_every_fault_has_a_status(fault: Fault) -> None:
    """A new fault needs its row in the table."""
    assert all(400 <= DEFAULT_STATUSES.of_fault(fault, dialect) < 600 for dialect in Dialect)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_class_has_a_fault(kind: type[LmiError]) -> None:
    """The name that clients see is upstream's or vLLM's, never our class's."""
    assert kind.fault in Fault
    assert kind.fault.kind.endswith("Exception")
    assert kind.__doc__


STATUSES: dict[str, tuple[LmiError, Dialect, int]] = {
    "payload": (PayloadError("x"), Dialect.LMI, 424),
    "payload, openai": (PayloadError("x"), Dialect.OPENAI, 400),
    "payload, tgi": (PayloadError("x"), Dialect.TGI, 422),
    "adapter": (UnknownAdapterError("a"), Dialect.LMI, 424),
    "adapter, openai": (UnknownAdapterError("a"), Dialect.OPENAI, 404),
    "adapter, tgi": (UnknownAdapterError("a"), Dialect.TGI, 422),
    "slot": (NoAdapterSlotError("a"), Dialect.LMI, 424),
    "slot, openai": (NoAdapterSlotError("a"), Dialect.OPENAI, 503),
    "slot, tgi": (NoAdapterSlotError("a"), Dialect.TGI, 429),
    "overload": (OverloadError("m"), Dialect.LMI, 503),
    "overload, openai": (OverloadError("m"), Dialect.OPENAI, 503),
    "overload, tgi": (OverloadError("m"), Dialect.TGI, 429),
    "engine": (EngineFailureError("x"), Dialect.LMI, 500),
    "engine, openai": (EngineFailureError("x"), Dialect.OPENAI, 500),
    "engine, tgi": (EngineFailureError("x"), Dialect.TGI, 424),
    "death": (EngineDeadError(), Dialect.LMI, 500),
    "death, tgi": (EngineDeadError(), Dialect.TGI, 500),
    "anything": (LmiError("x"), Dialect.SERVER, 500),
}


@pytest.mark.parametrize(("error", "dialect", "status"), STATUSES.values(), ids=STATUSES)
def test_errors_status_by_dialect(error: LmiError, dialect: Dialect, status: int) -> None:
    """One fault, and the status that each dialect gives it."""
    assert DEFAULT_STATUSES.of(error, dialect) == status


TGI = {
    422: "validation",
    404: "validation",
    424: "generation",
    429: "overloaded",
    500: "incomplete_generation",
    503: "unhealthy",
}


@pytest.mark.parametrize(("status", "kind"), TGI.items(), ids=str)
def test_errors_tgi_kind(status: int, kind: str) -> None:
    """TGI's clients raise their exceptions by this word."""
    assert tgi_error("x", status) == {"error": "x", "error_type": kind}


OPENAI: dict[str, tuple[LmiError, int, str]] = {
    "payload": (PayloadError("x"), 400, "BadRequestError"),
    "adapter": (UnknownAdapterError("x"), 404, "NotFoundError"),
    "overload": (OverloadError("m"), 503, "ServiceUnavailableError"),
    "slot": (NoAdapterSlotError("x"), 503, "ServiceUnavailableError"),
    "engine": (EngineDeadError(), 500, "InternalServerError"),
}


@pytest.mark.parametrize(("error", "status", "kind"), OPENAI.values(), ids=OPENAI)
def test_errors_openai_type(error: LmiError, status: int, kind: str) -> None:
    """On /v1 an error of ours looks like one of vLLM's."""
    assert openai_error(error, "t", status) == {
        "error": {"message": "t", "type": kind, "param": None, "code": status}
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://AKIA:s3cret@b/a is missing", "s3://***@b/a is missing"),
        ("https://h/a?X-Amz-Signature=s3cret&x=1", "https://h/a?X-Amz-Signature=***&x=1"),
        ("https://h/a?x=1 is missing", "https://h/a?x=1 is missing"),
    ],
)
def test_errors_hide_what_a_caller_put_into_a_url(text: str, shown: str) -> None:
    """The answer goes through logs of proxies and clients that the request did not."""
    assert PayloadError(text).text == shown


@pytest.mark.parametrize("kind", [PayloadError, UnknownAdapterError, StartupError])
def test_errors_repeat_no_field_of_megabytes(kind: type[LmiError]) -> None:
    """On the event loop, and for each request of a client: begin and end say what it is."""
    began = time.process_time()
    text = kind("name: " + "://" * 1_000_000 + " is none").text
    assert time.process_time() - began < 0.5
    assert len(text) < 100_000
    assert "name: ://" in text
    assert text.endswith((" is none", "loaded adapters"))
    assert "characters are left out" in text


def test_errors_hide_what_begins_before_the_end_that_is_shown() -> None:
    """A signature that the cut divides is masked as a whole."""
    signed = "https://h/a?x-amz-security-token=" + "s3cret" * 100 + " x" * 800
    assert "s3cret" not in PayloadError("v" * 100_000 + signed).text
