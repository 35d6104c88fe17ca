"""Ray as what starts the workers: where it cannot be, that is said before a byte is fetched."""

import pytest

from lmi_vllm.errors import ConfigurationError
from lmi_vllm.messages import EngineArguments, Origin, OriginKind

pytestmark = pytest.mark.vllm
ray_utils = pytest.importorskip("vllm.v1.executor.ray_utils", reason="needs vLLM: make setup")
ORIGINS = {
    "distributed_executor_backend": Origin(OriginKind.VARIABLE, "OPTION_WORKER_USE_RAY"),
    "data_parallel_backend": Origin(OriginKind.FILE, "serving.properties"),
}
INSTEAD = "Without Ray: mp on one machine, DJL_CLUSTER_SIZE for several"


def refusals(**values: object) -> tuple[str, ...]:
    """What the check before the start complains of."""
    from lmi_vllm.engine.vllm.start import check_arguments  # noqa: PLC0415 (imports vLLM)

    try:
        check_arguments(EngineArguments(values, ORIGINS))
    except ConfigurationError as error:
        return error.problems
    return ()


def test_platform_without_ray_is_named_with_the_way_out() -> None:
    """The CPU of these tests is one; each argument that asks for Ray is named with its origin."""
    reason = "vLLM's platform here is cpu, which does not support Ray"
    assert refusals(distributed_executor_backend="ray", data_parallel_backend="ray") == (
        f"distributed_executor_backend=ray (OPTION_WORKER_USE_RAY) is not possible: {reason}. "
        + INSTEAD,
        f"data_parallel_backend=ray (serving.properties) is not possible: {reason}. {INSTEAD}",
    )
    assert refusals(distributed_executor_backend="mp", data_parallel_backend="mp") == ()


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a platform that could have it, as CUDA's; with Ray there is nothing to say."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU")
    monkeypatch.setattr(ray_utils, "ray", None)
    monkeypatch.setattr(ray_utils, "ray_import_err", "No module named 'ray'")
    assert refusals(distributed_executor_backend="ray") == (
        "distributed_executor_backend=ray (OPTION_WORKER_USE_RAY) is not possible: Ray cannot be "
        f"imported (No module named 'ray'): pip install ray on every node. {INSTEAD}",
    )
    monkeypatch.setattr(ray_utils, "ray", object())
    assert refusals(distributed_executor_backend="ray") == ()
