"""What is fuzzed: each target takes bytes and raises only what is a fault of ours.

`LmiError` is the right answer to invalid input and is let through silently; anything else that
escapes is a crash. hypothesis and atheris call the same functions.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from multidict import CIMultiDict

from lmi_vllm.adapters.check import check_adapter
from lmi_vllm.checks.base_model import describe_base
from lmi_vllm.checks.safetensors_header import DamagedFileError, read_tensors
from lmi_vllm.config.properties import parse_properties
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.errors import LmiError
from lmi_vllm.features.error_rates.rates import error_rate
from lmi_vllm.inference.pipeline import PayloadKind, dispatch
from lmi_vllm.inference.request.adapter_names import adapter_names, chosen_adapters
from lmi_vllm.inference.request.body import decode_body, form_field
from lmi_vllm.inference.request.limits import check_limits, sequence_count
from lmi_vllm.inference.request.lmi import parse_lmi_request
from lmi_vllm.messages import InferenceCall, RequestLimits, ServingProfile
from lmi_vllm.sources.extract import extract_archive
from lmi_vllm.web.inference_routes import request_properties

CONTENT_TYPES: Final = (
    "",
    "application/json",
    "text/csv",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "multipart/form-data",
    "application/x-npy",
    "application/json; charset=latin-1",
)
_PROFILES: Final = (ServingProfile(), ServingProfile(tgi_compat=True))
_BASE: Final = describe_base(DEMO_MODEL_DIR, ("lmi",), 8)


def payload(data: bytes) -> None:
    """A request body of any content type, up to the typed request and its adapters."""
    if not data:
        return
    content_type = CONTENT_TYPES[data[0] % len(CONTENT_TYPES)]
    profile = _PROFILES[data[0] // len(CONTENT_TYPES) % 2]
    body = data[1:]
    with contextlib.suppress(LmiError):
        form_field(body, content_type, "model_name")
    with contextlib.suppress(LmiError):
        fields = decode_body(body, content_type)
        call = InferenceCall(body, content_type)
        check_limits(fields, RequestLimits())
        sequence_count(fields)
        if dispatch(fields) is PayloadKind.GENERATION:
            parse_lmi_request(fields, profile)
        adapter_names(chosen_adapters(call, fields), fields, lambda _: False)


def properties(data: bytes) -> None:
    """A serving.properties, as Java would read it."""
    parse_properties(data.decode("utf-8", "replace"))
    parse_properties(data.decode("latin-1"))


def archive(data: bytes) -> None:
    """An archive of a model or an adapter: nothing of it may land outside of its folder."""
    if not data:
        return
    root = Path(tempfile.mkdtemp(prefix="fuzz-archive-"))
    try:
        suffix = (".zip", ".tar.gz", ".mar", ".tgz")[data[0] % 4]
        file = root / f"a{suffix}"
        file.write_bytes(data[1:])
        destination = root / "inside"
        with contextlib.suppress(LmiError):
            sizes = extract_archive(file, destination, "the archive")
            found = {str(path.relative_to(destination)) for path in destination.rglob("*")}
            assert set(sizes) <= found
        assert {path.name for path in root.iterdir()} <= {file.name, "inside"}
        assert not any(path.is_symlink() for path in root.rglob("*"))
    finally:
        shutil.rmtree(root)


def weights(data: bytes) -> None:
    """A safetensors file."""
    with tempfile.NamedTemporaryFile(prefix="fuzz-") as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(DamagedFileError):
            read_tensors(Path(file.name))


def adapter(data: bytes) -> None:
    """A whole adapter: configuration, a zero byte, weights."""
    config, _, rest = data.partition(b"\0")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-adapter-"))
    try:
        (folder / "adapter_config.json").write_bytes(config)
        (folder / "adapter_model.safetensors").write_bytes(rest)
        with contextlib.suppress(LmiError):
            check_adapter(folder, "the adapter", _BASE)
    finally:
        shutil.rmtree(folder)


def headers(data: bytes) -> None:
    """Request headers, SageMaker's custom attributes among them."""
    given: CIMultiDict[str] = CIMultiDict()
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        name, _, value = line.partition(":")
        given.add(name or "X-Amzn-SageMaker-Custom-Attributes", value)
    given.add("X-Amzn-SageMaker-Custom-Attributes", data.decode("utf-8", "surrogateescape"))
    found = request_properties(given)
    for text in found.values():
        text.encode()  # what it holds may be written into answers and logs
    call = InferenceCall(b"", properties=found)
    with contextlib.suppress(LmiError):
        adapter_names(chosen_adapters(call, {}), {}, lambda _: True)


def rates(data: bytes) -> None:
    """An error rate, the one text parser with a grammar of its own."""
    with contextlib.suppress(ValueError):
        count, seconds = error_rate(data.decode("utf-8", "replace"))
        assert count > 0
        assert seconds > 0


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = MappingProxyType(
    {
        target.__name__: target
        for target in (payload, properties, archive, weights, adapter, headers, rates)
    }
)
