"""Values of a request that vLLM cannot send to its engine, and objects that it takes any value for.

vLLM keeps a request in its tables first, and encodes it for the engine then. If a value has no
encoding, it forgets nothing and answers 500. So the request is aborted here, and the error names
the field. A request id without an encoding could not even be aborted, so it is refused before.
Parameters of a transfer of the KV cache may also be given among the extra arguments, where vLLM
checks only the names. It reads an entry of what may be a number.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: 500 without a text for half of a surrogate pair, for an integer beyond 64 bits, and for
    `vllm_xargs` with `kv_transfer_params` that is no object. The first two stay in vLLM's tables
    for as long as the server runs.
May go: when test_plain_vllm_keeps_a_request_that_cannot_be_sent and
    test_plain_vllm_reads_transfer_parameters_that_are_no_object fail.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

UNSENDABLE: Final = (OverflowError, UnicodeEncodeError)  # beyond 64 bits; half of a character
_TRANSFERS: Final = ("kv_transfer_params", "ec_transfer_params")
_CLIENT_NAMES: Final = {"extra_args": "vllm_xargs"}  # of a field of vLLM's sampling parameters


def fault_of(request_id: str, params: Any) -> str:
    """Return what is wrong with a request that vLLM would keep or fail on; "" if nothing is."""
    try:
        request_id.encode()
    except UnicodeEncodeError as error:
        return f"request_id: {_explained(error)}"
    try:
        "".join(getattr(params, "bad_words", None) or ()).encode()
    except UnicodeEncodeError as error:  # the tokenizer's error has no text
        return f"bad_words: {_explained(error)}"
    extra = getattr(params, "extra_args", None) or {}
    for name in _TRANSFERS:
        if not isinstance(extra.get(name) or {}, dict):
            return f"{name}: expected an object"
    return ""


def unsent(error: Exception, params: Any, options: Mapping[str, object]) -> str:
    """Return what to say of an error of `UNSENDABLE`: the field's name, and why."""
    for name, value in _fields(params, options):
        try:
            msgspec.msgpack.encode(value, enc_hook=str)
        except UNSENDABLE as found:
            return f"{_CLIENT_NAMES.get(name, name)}: {_explained(found)}"
    return f"a value of the request: {_explained(error)}"


def _fields(params: Any, options: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name in getattr(params, "__struct_fields__", ()):
        yield name, getattr(params, name)
    yield from options.items()


def _explained(error: Exception) -> str:
    if isinstance(error, OverflowError):
        return "cannot be sent to the engine; an integer has at most 64 bits"
    return f"cannot be sent to the engine: {error}"
