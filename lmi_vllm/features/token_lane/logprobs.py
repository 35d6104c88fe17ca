"""Log probabilities of the engine's outputs, decoded only when they are read.

vLLM makes three arrays of each output's log probabilities, by two Python functions for each array.
That is most of what a log probability costs. A stream needs one number of them, so these outputs
keep the message's bytes. Code of vLLM's that reads them gets its arrays.
"""

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Raw

from lmi_vllm.engine.vllm.names import EngineCoreOutput, EngineCoreOutputs, LogprobsLists

# An array of one number as vLLM writes it (`serial_utils.MsgpackEncoder`): type, shape, bytes.
_ONE_FLOAT: Final = b"\x93\xa3<f4\x92\x01\x01\xd6\x03"
_FLOAT: Final = Struct("<f")


class LazyLogprobs(msgspec.Struct, array_like=True, gc=False):
    """`LogprobsLists` as they are in a message; unpacked, sliced and indexed as those."""

    logprob_token_ids: Raw
    logprobs: Raw
    sampled_token_ranks: Raw
    cu_num_generated_tokens: list[int] | None = None

    def lists(self) -> LogprobsLists:
        """Return vLLM's arrays."""
        raws = (self.logprob_token_ids, self.logprobs, self.sampled_token_ranks)
        return LogprobsLists(*map(_array, raws), self.cu_num_generated_tokens)

    def slice_request(self, index: int, positions: int) -> LogprobsLists:
        """Return the arrays of some positions."""
        return self.lists().slice_request(index, positions)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.lists())

    def __getitem__(self, place: Any) -> Any:
        return self.lists()[place]


class LazyOutput(EngineCoreOutput, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg,misc,unused-ignore]
    """vLLM's output of a sequence, with log probabilities that are decoded late."""

    new_logprobs: LazyLogprobs | None = None


class LazyOutputs(EngineCoreOutputs, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg,misc,unused-ignore]
    """vLLM's message of a step, with such outputs."""

    outputs: list[LazyOutput] = msgspec.field(default_factory=list)


def has_known_arrays() -> bool:
    """Whether this release's log probabilities are the arrays that are known here."""
    return tuple(LogprobsLists.__annotations__) == LazyLogprobs.__struct_fields__


class LazyDecoder:
    """Decodes messages of the engine for vLLM's `MsgpackDecoder`, in place of its own decoder.

    A message of several frames, which only has large arrays, is left to vLLM's.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._whole = owner.decoder
        self._lazy = msgspec.msgpack.Decoder(
            LazyOutputs, ext_hook=owner.ext_hook, dec_hook=owner.dec_hook
        )

    def decode(self, frame: Any) -> Any:
        """Return the message."""
        frames = self._owner.aux_buffers
        return (self._lazy if len(frames) <= 1 else self._whole).decode(frame)


def sampled_logprobs(logprobs: Any) -> list[float]:
    """Return the log probabilities of the sampled tokens, which the sampler puts first."""
    if type(logprobs) is LazyLogprobs:
        raw = bytes(logprobs.logprobs)
        if raw.startswith(_ONE_FLOAT):
            return [_FLOAT.unpack_from(raw, len(_ONE_FLOAT))[0]]
    return [row.item(0) for row in logprobs[1]]


class _Extension(msgspec.Struct, array_like=True, gc=False):
    """An array in a message."""

    dtype: str
    shape: list[int]
    data: msgspec.msgpack.Ext


_ARRAYS: Final = msgspec.msgpack.Decoder(_Extension)


def _array(raw: Raw) -> Any:
    found = _ARRAYS.decode(raw)
    return np.frombuffer(bytes(found.data.data), found.dtype).reshape(found.shape)
