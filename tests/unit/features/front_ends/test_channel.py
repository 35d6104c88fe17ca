"""The line between front-end processes: every message and every error comes out as it went in."""

import asyncio
import pickle
import socket
from types import MappingProxyType

import pytest

from lmi_vllm import errors
from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.engine.vllm.engine_calls import LoadedAdapter
from lmi_vllm.errors import LmiError, NotReadyError, UnknownAdapterError
from lmi_vllm.features.front_ends.channel import (
    AdapterList,
    CallReply,
    Channel,
    ChannelClosedError,
    LoadAdapter,
)
from lmi_vllm.messages import AdapterRef
from tests.support.assembled import load_settings

ERRORS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LmiError)
]


async def two_ends() -> tuple[Channel, Channel]:
    """Return both ends of a line."""
    one, other = socket.socketpair()
    return await Channel.over(one), await Channel.over(other)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_travels_whole(kind: type[LmiError]) -> None:
    """Text, status and whatever else it carries, whichever arguments its constructor takes."""
    problems: object = ["a", "b"] if kind is errors.ConfigurationError else "why"
    try:
        error = kind(problems)
    except TypeError:
        error = kind()
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.text, copy.args) == (kind, error.text, error.args)
    assert vars(copy) == vars(error)


async def test_messages_arrive_in_order_and_whole() -> None:
    """Large ones too, with the read-only mappings that settings and adapters hold."""
    here, there = await two_ends()
    adapter = Adapter("a", "/a", options=MappingProxyType({"x": "y" * 300_000}))
    message = AdapterList(3, (adapter,), (LoadedAdapter(7, "a@7", "/private", "a"),), 1.5)
    settings = load_settings({"OPTION_TENSOR_PARALLEL_DEGREE": "1"})
    sent = [message, settings, AdapterRef("a", "/a", 1)]
    for each in sent:
        here.send(each)
    assert [await there.receive() for _ in sent] == sent
    here.close()
    with pytest.raises(ChannelClosedError):
        await there.receive()
    there.close()


async def test_call_returns_a_result_or_an_error() -> None:
    """By number; a call to a process that ends fails and does not wait."""
    here, there = await two_ends()
    asking = [asyncio.create_task(here.call(LoadAdapter(number, "a"))) for number in range(3)]
    for _ in asking:
        assert isinstance(await there.receive(), LoadAdapter)
    here.resolve(CallReply(1))
    here.resolve(CallReply(0, UnknownAdapterError("a")))
    here.resolve(CallReply(99))  # of no call
    await asking[1]
    with pytest.raises(UnknownAdapterError):
        await asking[0]
    here.close()
    with pytest.raises(NotReadyError):
        await asking[2]
    with pytest.raises(NotReadyError):
        await here.call(LoadAdapter(4, "a"))
    there.close()
