"""Errors of a failed start: one sentence that names the cause, from what vLLM and torch say."""

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lmi_vllm.engine.base import lacks_memory, start_error
from lmi_vllm.engine.deaths import OomKills, ended_so
from lmi_vllm.engine.vllm.cache_size import CacheSize
from lmi_vllm.engine.vllm.processes import described
from lmi_vllm.errors import EngineMemoryError, EngineStartError
from lmi_vllm.host_memory import memory_place
from lmi_vllm.messages import EngineArguments
from lmi_vllm.private_folders import SHARED_MEMORY

# How vLLM names processes that ended before they were ready (v1/engine/utils.py, 0.31 to 0.33).
_KILLED: Final = re.compile(r"Failed core proc\(s\): \{.*?'(\w+)': (-\d+)")
# Texts of Python and of transformers, as they come from the engine's process.
_NO_TORCHVISION_MARKS: Final = (
    "No module named 'torchvision",
    "import of torchvision halted",  # companions.py has hidden it
    "requires the Torchvision library",
)
# Texts of the C library: a compiler of torch's repeats its command, of thousands of characters.
_FULL_DISK: Final = re.compile(r"No space left on device|Disk quota exceeded")
# Where an engine that starts writes, besides the folder of temporary files.
_WRITTEN: Final = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# vLLM's CPU worker: what its share leaves for the cache is below nothing.
_MODEL_ABOVE_SHARE: Final = re.compile(r"requested memory for kv \((-|0\.0/)")
# Of the cache that was made, whatever its size was made of (v1/core/kv_cache_utils.py).
_CACHE_TOO_SMALL: Final = re.compile(
    r"No available memory for the cache blocks|larger than the available KV cache memory"
    r"|Cannot auto-fit max_model_len"
)
_NEEDED_CACHE: Final = re.compile(r"([\d.]+) GiB KV cache is needed")
_MOST_OF_FREE: Final = 0.75  # that the cache may take: the rest is for requests
_SIZE: Final = "kv_cache_memory_bytes"
_SHARE: Final = "gpu_memory_utilization"
_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"  # the same size, of the environment alone
_GIB: Final = 1 << 30
_FULL_BYTES: Final = 64 * 1024**2  # what is left when a library or a kernel did not fit
# What pydantic writes around the text of each check of vLLM's.
_PYDANTIC_BEGIN: Final = re.compile(
    r"^(?:\w*Error: )?\d+ validation errors? for \w+ (?:Value error, )?"
)
_PYDANTIC_END: Final = re.compile(r" \[type=\w+, input_value=.*$")
_HEAD, _TAIL = 300, 700  # characters of a long text that are kept
_DISK_PART: Final = 150


def start_error_of(
    error: Exception,
    cause: str | None,
    arguments: EngineArguments,
    oom_kills: OomKills,
    environ: Mapping[str, str],
    cache: CacheSize | None = None,
) -> EngineStartError:
    """Return the error of a failed start; `cause` is what a process of the engine has logged.

    `environ` are the variables that the engine got, `cache` is what a worker on a CPU has told.
    """
    if cause is None and (killed := _KILLED.search(str(error))):
        name, code = killed.groups()
        text = ended_so(f"the engine did not start: its process {name} ended", int(code), oom_kills)
        return (EngineMemoryError if oom_kills.words() else EngineStartError)(text)
    whole = " ".join((cause or described(error)).split())
    whole = _PYDANTIC_END.sub("", _PYDANTIC_BEGIN.sub("", whole))
    if full := _FULL_DISK.search(whole):
        text = _shortened(whole, _DISK_PART, _DISK_PART)
        return EngineStartError(
            f"the engine did not start: {full[0]}{_full_folders(environ)}: {text}"
        )
    text = _shortened(whole, _HEAD, _TAIL)
    if words := oom_kills.words():
        return EngineMemoryError(f"the engine did not start: {words}: {text}")
    advice = ""
    if lacks_memory(whole):
        text, advice = f"OOM: {text.rstrip('.')}", f". {_memory_advice(whole, arguments, cache)}"
    if any(mark in whole for mark in _NO_TORCHVISION_MARKS):
        advice += (
            ". Models that take pictures need it: pip install --no-deps torchvision, in the "
            "release made for the installed torch"
        )
    named = with_argument(f"the engine did not start: {text}", arguments)
    return start_error(f"{named}{advice}")


def smaller_cache(arguments: EngineArguments, error_file: Path) -> str:
    """Return how to make the KV cache of an engine on a CPU smaller, or what it has before that.

    Empty where nothing is known that helps.
    """
    if (cache := CacheSize.read(error_file)) is None:
        slots = [_shown(name, arguments) for name in ("max_loras", "max_lora_rank")]
        return f"lower {' or '.join(slots)}" if arguments.values.get("enable_lora") else ""
    if arguments.values.get(_SIZE) is not None:
        return f"lower {_shown(_SIZE, arguments)}"
    if arguments.values.get(_SHARE) is not None:
        return f"lower {_shown(_SHARE, arguments)}"
    return f"set {_SIZE} below {cache.size}, which the server has chosen"


def check_length(length: int, own: int, served: int) -> None:
    """Check an engine that takes the place of one before; `own` is the model's length.

    One that was fitted to the memory may be a quarter shorter: what is free differs a little.

    Raises:
        EngineMemoryError: it would refuse prompts that were answered before.
    """
    least = served if served >= own else served * 3 // 4
    if length < least:
        raise EngineMemoryError(
            f"the engine did not start: OOM: its KV cache fits {length} tokens, and the engine "
            f"before it served {served} (max_model_len). Give it the memory back that it had, set "
            f"max_model_len to what always fits, or to auto, which lets it become shorter"
        )


def _memory_advice(text: str, arguments: EngineArguments, cache: CacheSize | None) -> str:
    """Return which arguments to change for lack of memory, each with its value and origin.

    What one error advises must not lead to another error that advises the opposite.
    """
    values = arguments.values
    share, size, length = (_shown(name, arguments) for name in (_SHARE, _SIZE, "max_model_len"))
    is_given = values.get(_SIZE) is not None
    if _MODEL_ABOVE_SHARE.search(text):
        return (
            f"The model takes all of its share of the memory: raise {share}; if a higher one does "
            f"not fit, set {_SIZE} instead of it, or give more memory"
        )
    if "on startup is less than desired" in text:  # before the model is loaded
        return (
            f"Lower {share}; if the model does not fit in less, set {_SIZE} instead of it, or give "
            "more memory"
        )
    if "Decrease --kv-cache-memory-bytes" in text:
        if is_given:
            return f"Lower {size}; if {length} needs more, lower it, too, or give more memory"
        return f"The server has chosen this size: set a lower {_SIZE}, or give more memory"
    if _CACHE_TOO_SMALL.search(text):
        return _advice_for_a_small_cache(text, arguments, cache)
    names = [_SHARE, "max_model_len"]
    if values.get("enable_lora"):
        names += ["max_loras", "max_lora_rank"]
    *first, last = (_shown(name, arguments) for name in names)
    return f"Lower {', '.join(first)} or {last}"


def _advice_for_a_small_cache(
    text: str, arguments: EngineArguments, cache: CacheSize | None
) -> str:
    """Return what makes it larger, where there is room, or what needs less.

    Only where vLLM says what is needed does a smaller length help: else no length has room.
    """
    values, needed = arguments.values, _NEEDED_CACHE.search(text)
    names = [name for name in (_SIZE, _SHARE) if values.get(name) is not None]
    raised = f"Raise {_shown([*names, _SHARE][0], arguments)}"
    if cache is not None and not names:
        raised = f"Set {_SIZE} above {cache.size}, which the server has chosen"
    lowered = f"lower {_shown('max_model_len', arguments)}"
    if cache is None:
        return f"{raised}, or {lowered}" if needed else raised
    has_room = float(needed[1]) * _GIB < cache.free * _MOST_OF_FREE if needed else bool(names)
    more = f"give more memory than {memory_place()} has"
    if has_room:
        return f"{raised}, or {lowered if needed else more}"
    free = f"{cache.free / _GIB:.2f} GiB are free for the cache and what requests take"
    return f"{free}: {lowered}, or {more}" if needed else f"{free}: {more}"


def _shown(name: str, arguments: EngineArguments) -> str:
    value, origin = arguments.values.get(name), arguments.origin_of(name)
    if value is None:
        return name
    if origin.name == _SPACE and isinstance(value, int):  # the option beside it is refused
        return f"{_SPACE} ({value / _GIB:g}, in GiB)"
    return f"{name} ({value} from {origin})"


def with_argument(text: str, arguments: EngineArguments) -> str:
    """Return the problem with the argument whose value vLLM's message names."""
    text = _PYDANTIC_END.sub("", " ".join(text.split()))
    named = [
        f"{name} from {arguments.origin_of(name)}"
        for name, value in arguments.values.items()
        if name != "model" and _is_named(name, value, text)
    ]
    return f"{text} ({', '.join(named)})" if named else text


def _is_named(name: str, value: object, text: str) -> bool:
    """Whether a text is about this value: a word that it quotes, a number beside its name."""
    if isinstance(value, str):
        return repr(value) in text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (
        is_number
        and name in text
        and re.search(rf"(?<!\d){re.escape(str(value))}(?!\d)", text) is not None
    )


def _shortened(text: str, head: int, tail: int) -> str:
    """Return the beginning and the end of a long text, for the last line of the log."""
    return text if len(text) <= head + tail else f"{text[:head]} [...] {text[-tail:]}"


def _full_folders(environ: Mapping[str, str]) -> str:
    """Return the full ones of the folders that a start writes to, with the variables that set them.

    Empty if all of them have room: another folder is full, or a file was removed meanwhile.
    """
    folders = {"TMPDIR": Path(tempfile.gettempdir()), "shared memory": SHARED_MEMORY}
    folders |= {name: Path(environ[name]) for name in _WRITTEN if environ.get(name)}
    folders.setdefault("VLLM_CACHE_ROOT", Path("~/.cache/vllm").expanduser())
    found = []
    for name, folder in folders.items():
        place = next(one for one in (folder, *folder.parents) if one.exists())
        disk = shutil.disk_usage(place)
        if disk.free < min(_FULL_BYTES, disk.total / 10):  # Docker's shared memory has 64 MiB
            found.append(f"{folder} ({name}) has {disk.free / 1e6:.1f} MB free")
    return f": {', '.join(found)}" if found else ""
