"""The estimate of `validate` against what the engine takes, on a shape with dummy weights."""

import json
import re

from integration.gpu.models import engine_arguments, write_shape
from integration.gpu.suite import LeftOutError, Suite

_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_WEIGHTS = re.compile(r"Model loading took ([\d.]+) GiB")
_AVAILABLE = re.compile(r"Available KV cache memory: ([\d.]+) GiB")


def memory_estimate(suite: Suite) -> str:
    """Weights to 3 %, bytes of a token to 1 %; what is set aside for activations is a figure.

    On a CPU only the cache, whose size is given there, can be compared.
    """
    try:
        from lmi_vllm.features.validate import memory_estimate as estimates  # noqa: PLC0415
        from lmi_vllm.features.validate.model_shape import read_shape  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise LeftOutError("needs the feature `validate`") from error
    model = write_shape(suite)
    shape = read_shape(json.loads((model / "config.json").read_text("utf-8")))
    device = suite.machine.device_bytes if suite.machine.has_gpu else None
    found = estimates.estimate_memory(shape, engine_arguments(suite), None, device)
    assert found is not None
    assert found.free_bytes is not None
    with suite.server("--model", str(model)) as (server, _):
        log = server.stderr
    tokens = int(_number(_TOKENS, log).replace(",", ""))
    if not suite.machine.has_gpu:
        assert abs(tokens - found.cache.longest(found.free_bytes)) <= tokens * 0.01
        return f"{tokens} tokens of KV cache, as estimated"
    gib = estimates.GIB
    weights, free = float(_number(_WEIGHTS, log)), float(_number(_AVAILABLE, log))
    suite.tables.append(
        (
            f"Memory of the {suite.shape} shape on one GPU",
            ["what", "engine", "estimate"],
            [
                ["weights, GiB", f"{weights:.2f}", f"{found.weight_bytes / gib:.2f}"],
                ["left for the KV cache, GiB", f"{free:.2f}", f"{found.free_bytes / gib:.2f}"],
                ["tokens of KV cache", f"{tokens}", f"{found.longest_fit}"],
            ],
        )
    )
    assert abs(weights - found.weight_bytes / gib) <= weights * 0.03
    assert abs(tokens - found.cache.longest(free * gib)) <= tokens * 0.01
    return f"{free:.2f} GiB left, estimated {found.free_bytes / gib:.2f}"


def _number(pattern: re.Pattern[str], log: str) -> str:
    """What the engine's log says last; AssertionError where it does not."""
    found = pattern.findall(log)
    assert found, f"the log has no line like {pattern.pattern!r}"
    return str(found[-1])
