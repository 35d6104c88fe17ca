"""Files of weights that are not what their names say: pointers, empty, cut or zeroed files.

The engine's own errors name no file, and some of them speak of memory.
"""

import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.safetensors_header import DamagedFileError, read_tensors

_POINTER: Final = b"version https://git-lfs.github.com/spec"
_LENGTH_BYTES: Final = 8
_LONGEST_HEADER: Final = 100_000_000  # safetensors' own limit
_PICKLE: Final = b"\x80"
_ZIP: Final = b"PK"
_PICKLED: Final = ("pytorch_model*.bin", "model*.bin")  # other files may end so, too
_ENDS: Final = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d+)\s*\]')
_INDEX: Final = "model.safetensors.index.json"
# vLLM makes one layer of several weights, and does not notice where one is not in the files.
_OF_LAYER: Final = re.compile(r".*\.\d+\..*\.\w*weight\w*")
_PART: Final = re.compile(r"(.*\.)(k_proj|v_proj|gate_proj)(\.\w*weight\w*)")
_PART_OR_BESIDE: Final = re.compile(r"(.*\.)(k_proj|v_proj|gate_proj|up_proj)(\.\w*weight\w*)")
# What is there beside a part. Some layers have queries or an up projection alone, and in Gemma 4
# keys are the values as well.
_BESIDE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"v_proj": ("k_proj", "q_proj"), "k_proj": ("q_proj",), "gate_proj": ("up_proj",)}
)
# The last part of attention, and of a gated MLP. Where it is not there, the names mean something
# else: `gate_proj` of the attention in AFMoE and of the compressors in DeepSeek V4.
_LAST: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "v_proj": ("o_proj", "out_proj"),
        "k_proj": ("o_proj", "out_proj"),
        "gate_proj": ("down_proj",),
    }
)

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert


def weight_problems(folder: Path) -> Iterator[str]:
    """Yield a sentence for each file of weights in `folder` that no engine can load.

    Only beginnings and sizes are read. Other faults of a file are left to the engine.
    """
    found = sorted(folder.glob("*.safetensors"))  # where there are some, others are not read
    for path in found or sorted(path for kind in _PICKLED for path in folder.glob(kind)):
        try:
            problem = _problem(path)
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}"
        if problem:
            yield f"{path} {problem}"
    if found:
        yield from _index_problems(folder, found)


def _problem(path: Path) -> str:
    size = path.stat().st_size
    if not size or not path.is_file():  # who opens a named pipe waits for its other end
        other = "is a directory, not a file of weights" if path.is_dir() else "is no regular file"
        return "is empty" if path.is_file() else other
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if start == _POINTER:
        return (
            "is a pointer of git-lfs, not the weights: run git lfs pull, or fetch the model again"
        )
    if path.suffix == ".safetensors":
        return _safetensors_problem(path, size)
    if not start.startswith((_ZIP, _PICKLE)):
        return "is no file that torch.save wrote: it was cut, zeroed, or is something else"
    if start.startswith(_ZIP) and not zipfile.is_zipfile(path):
        return f"is cut: of its {size} bytes the end is missing; fetch it again"
    return ""


def _safetensors_problem(path: Path, size: int) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = file.read(min(length, _LONGEST_HEADER))
    if not header.startswith(b"{"):
        return "has no header of safetensors: it was zeroed, or is something else"
    if len(header) < length:
        return f"is cut: its header has {length} bytes and the file {size}; fetch it again"
    ends = [int(end) for end in _ENDS.findall(header)]
    wanted = _LENGTH_BYTES + length + max(ends, default=0)
    if wanted > size:
        return f"is cut: its header says {wanted} bytes, and it has {size}; fetch it again"
    return ""


def _index_problems(folder: Path, found: list[Path]) -> Iterator[str]:
    """Yield an index that vLLM cannot read, a shard that is not there, or tensors that are not."""
    weight_map: dict[str, str] = {}
    if (index := folder / _INDEX).is_file():
        try:
            weight_map = dict(json.loads(index.read_bytes())["weight_map"].items())
            names = set(map(str, weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{index} is no index with a weight_map ({error!r:.100}): fetch it again"
            return
        missing = sorted(name for name in names if not (folder / name).exists())
        if missing and len(missing) < len(names):
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            lost = folder / missing[0]
            yield f"{lost}{more}, named by {_INDEX}, is not there: fetch the model again"
        if missing:
            return
        found = sorted(folder / name for name in names)
    yield from _missing_parts(folder, found, weight_map)


def _missing_parts(folder: Path, files: list[Path], named: Iterable[str]) -> Iterator[str]:
    """Yield the first part of a layer that vLLM would fill with whatever is in memory."""
    try:
        here = {name: one.shape for file in files for name, one in read_tensors(file).items()}
    except (DamagedFileError, OSError):
        return  # said above, or left to the engine
    wanted = set(filter(_OF_LAYER.fullmatch, named))
    modules = {name.rpartition(".")[0] for name in here}
    for match in filter(None, map(_PART.fullmatch, here)):
        before, part, after = match.groups()
        if any(before + last in modules for last in _LAST[part]):
            wanted.update(f"{before}{other}{after}" for other in _BESIDE[part])
    wanted |= _parts_of_others(here)
    if lost := sorted(wanted - here.keys()):
        more = f" and {len(lost) - 1} more" if lost[1:] else ""
        yield f"{folder} lacks {lost[0]}{more}, a part of a layer: fetch the model again"


def _parts_of_others(here: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the values and gates that other layers or experts of the same shapes have.

    Layers without values have queries of another width than those with them (Gemma 4).
    """
    by_kind: dict[object, tuple[set[str], set[str]]] = {}
    for match in filter(None, map(_PART_OR_BESIDE.fullmatch, here)):
        before, part, after = match.groups()
        kept = "v_proj" if part in ("v_proj", "k_proj") else "gate_proj"
        last = next((one for one in _LAST[kept] if f"{before}{one}{after}" in here), "")
        beside = [here.get(f"{before}{one}{after}") for one in (*_BESIDE[kept], last)]
        if None not in beside:
            kind = (_NUMBER.sub("*", before), kept, after, *map(tuple, filter(None, beside)))
            have, all_of_kind = by_kind.setdefault(kind, (set(), set()))
            all_of_kind.add(f"{before}{kept}{after}")
            if part == kept:
                have.add(f"{before}{kept}{after}")
    return {name for have, all_of_kind in by_kind.values() if have for name in all_of_kind}
