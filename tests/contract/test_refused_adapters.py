"""An adapter that cannot be used, for a request inside the engine's client: whose fault it is."""

from http import HTTPStatus

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from lmi_vllm.engine.vllm.async_llm import _refused
from lmi_vllm.engine.vllm.names import our_errors
from lmi_vllm.errors import EngineFailureError, LmiError, NotReadyError, UnknownAdapterError

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineFailureError(), HTTPStatus.INTERNAL_SERVER_ERROR),
        (NotReadyError("not ready"), HTTPStatus.SERVICE_UNAVAILABLE),
    ],
    ids=["engine", "not ready"],
)
def test_engine_that_died_meanwhile_is_no_error_of_the_client(
    error: LmiError, status: HTTPStatus
) -> None:
    """The first process holds the adapter's slot for another one, and has no engine any more."""
    with pytest.raises(GracefulHTTPError) as raised, _refused():
        raise error
    assert raised.value.http_status == status
    with pytest.raises(type(error)), our_errors(), _refused():
        raise error


def test_adapter_that_is_not_there_is() -> None:
    """As vLLM says it."""
    with pytest.raises(VLLMValidationError), _refused():
        raise UnknownAdapterError("x")
