"""Tensor, pipeline and data parallel sizes (docs/engine-options.md#parallel-sizes)."""

from dataclasses import dataclass

import pytest

from lmi_vllm.config.properties import parse_properties
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate


@dataclass(frozen=True)
class Case:
    """Options and variables on `gpus` devices; 0 copies stands for an argument left out."""

    given: str
    gpus: int
    tensor: int
    pipeline: int = 1
    copies: int = 0
    warns: str = ""
    fails: str = ""
    device_ids: tuple[int, ...] = ()


CASES = (
    Case("", 0, 1),
    Case("", 1, 1),
    Case("", 8, 8),
    Case("option.tensor_parallel_degree=max", 8, 8),
    Case("option.tensor_parallel_degree=MAX", 0, 1),
    Case("option.tensor_parallel_degree=2", 8, 2, copies=4),
    Case("option.tensor_parallel_degree=8", 8, 8),
    Case("option.tensor_parallel_degree=8", 4, 8, fails="not enough devices"),
    Case("option.tensor_parallel_degree=0", 4, 4),
    Case("option.tensor_parallel_degree=-1", 4, 4),
    Case("option.tensor_parallel_degree=3", 8, 3, copies=2, warns="GPU 6, 7 of 8"),
    Case("option.pipeline_parallel_degree=2", 8, 4, 2),
    Case("option.pipeline_parallel_degree=2", 5, 2, 2, warns="GPU 4 of 5"),
    Case("option.pipeline_parallel_degree=2\noption.tensor_parallel_degree=1", 8, 1, 2, copies=4),
    Case("option.pipeline_parallel_degree=4\noption.tensor_parallel_degree=4", 8, 4, 4,
         fails="need 16 GPUs, 8 are visible"),
    Case("option.tensor_parallel_degree=1\nmaxWorkers=2", 4, 1, copies=2, warns="GPU 2, 3"),
    Case("option.tensor_parallel_degree=1\nmaxWorkers=1", 4, 1, warns="GPU 1, 2, 3"),
    Case("option.tensor_parallel_degree=1\nmaxWorkers=1\ngpu.maxWorkers=4", 4, 1, copies=4),
    Case("option.tensor_parallel_degree=1\noption.enable_lora=true", 2, 1, copies=2),
    Case("option.tensor_parallel_degree=2\noption.enable_lora=true\nmaxWorkers=3", 8, 2, copies=3,
         warns="GPU 6, 7 of 8"),
    Case("option.tensor_parallel_degree=1\noption.data_parallel_size=2", 4, 1, copies=2,
         warns="GPU 2, 3"),
    Case("option.tensor_parallel_degree=2\noption.data_parallel_size=4", 4, 2, copies=4,
         fails="need 8 GPUs"),
    Case("option.tensor_parallel_degree=2", 0, 2, fails="there is no GPU"),
    # Ray's nodes may have what this one lacks: nothing is refused, no copies are made unasked.
    Case("option.distributed_executor_backend=ray\noption.tensor_parallel_degree=16", 8, 16),
    Case("option.distributed_executor_backend=ray\noption.tensor_parallel_degree=8\n"
         "option.pipeline_parallel_degree=2", 8, 8, 2),
    Case("option.distributed_executor_backend=ray\noption.tensor_parallel_degree=1", 4, 1),
    Case("option.distributed_executor_backend=ray\noption.tensor_parallel_degree=1\n"
         "option.data_parallel_size=8", 4, 1, copies=8),
    Case("option.distributed_executor_backend=ray\noption.tensor_parallel_degree=1\n"
         "load_on_devices=2", 4, 1, warns="Ray chooses the devices"),
    Case("load_on_devices=2", 4, 2, warns="", device_ids=(2, 3)),
    Case("load_on_devices=1\noption.tensor_parallel_degree=2", 4, 2, device_ids=(1, 2)),
    Case("load_on_devices=0;2\noption.tensor_parallel_degree=2", 4, 2, copies=2,
         device_ids=(0, 1, 2, 3)),
    Case("load_on_devices=0,2\noption.tensor_parallel_degree=1", 4, 1, copies=2,
         device_ids=(0, 2)),
    Case("load_on_devices=0;1\noption.tensor_parallel_degree=2", 4, 2, copies=2,
         fails="load_on_devices"),
    Case("load_on_devices=3\noption.tensor_parallel_degree=2", 4, 2, fails="there are 0 to 3"),
    Case("load_on_devices=-1", 4, 4, warns="load_on_devices"),
    Case("load_on_devices=-1", 0, 1),
    Case("load_on_devices=*", 4, 4),
    Case("option.load_on_devices=nd1", 4, 4, warns="load_on_devices"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.given!r} on {case.gpus}")
def test_sizes_follow_from_options_and_devices(case: Case) -> None:
    """Degrees, copies, devices, idle GPUs and what does not fit."""
    environ = {"SERVING_MODEL_STORE": "/nonexistent"}
    settings = load_settings(environ, extra_properties=parse_properties(case.given))
    result = translate(settings, None, Devices(case.gpus))
    values = result.arguments.values
    assert settings.errors == ()
    assert values["tensor_parallel_size"] == case.tensor
    assert values["pipeline_parallel_size"] == case.pipeline
    assert [case.fails in text for text in result.errors] == ([True] if case.fails else [])
    if not case.fails:
        assert values.get("data_parallel_size", 0) == case.copies
        assert tuple(values.get("device_ids", ())) == case.device_ids
        assert (len(result.warnings) == 1) == bool(case.warns)
        assert all(case.warns in text for text in result.warnings)


@pytest.mark.parametrize(
    "given",
    [
        "data_parallel_hybrid_lb=true", "data_parallel_external_lb=true", "data_parallel_rank=1",
        "data_parallel_multi_port_external_lb=true", "data_parallel_start_rank=0",
        "data_parallel_size_local=8",
    ],
)  # fmt: skip
def test_copies_outside_of_this_server_are_refused_by_name(given: str) -> None:
    """They ended with too few devices, or were taken silently."""
    file = parse_properties(f"option.{given}\noption.data_parallel_size=16\n")
    settings = load_settings({"SERVING_MODEL_STORE": "/nonexistent"}, extra_properties=file)
    (error,) = translate(settings, None, Devices(8)).errors
    assert error.startswith(
        f"{given.partition('=')[0]} (serving.properties line 1) is not possible"
    )
    file = parse_properties("option.data_parallel_size_local=1\noption.data_parallel_size=1\n")
    settings = load_settings({"SERVING_MODEL_STORE": "/nonexistent"}, extra_properties=file)
    assert translate(settings, None, Devices(8)).errors == ()


def test_two_cpu_ranks_need_a_place_each() -> None:
    """Without a GPU, ranks are placed on NUMA nodes, or where threads are bound by hand."""
    settings = load_settings({"OPTION_TENSOR_PARALLEL_DEGREE": "2"})
    assert translate(settings, None, Devices(0, cpu_rank_limit=1)).errors
    for limit in (2, None):
        result = translate(settings, None, Devices(0, cpu_rank_limit=limit))
        assert result.errors == ()
        assert result.arguments.values["tensor_parallel_size"] == 2


def test_sagemaker_workers_cap_the_copies_over_gpu_workers() -> None:
    """SAGEMAKER_NUM_MODEL_WORKERS overrides the file."""
    file = parse_properties("gpu.maxWorkers=4\noption.tensor_parallel_degree=1")
    environ = {"SERVING_MODEL_STORE": "/nonexistent", "SAGEMAKER_NUM_MODEL_WORKERS": "2"}
    settings = load_settings(environ, extra_properties=file)
    assert translate(settings, None, Devices(4)).arguments.values["data_parallel_size"] == 2


def test_serving_max_workers_counts_where_the_file_has_none() -> None:
    """The server-level default of maxWorkers."""
    settings = load_settings({"SERVING_MAX_WORKERS": "3", "OPTION_TENSOR_PARALLEL_DEGREE": "1"})
    assert translate(settings, None, Devices(4)).arguments.values["data_parallel_size"] == 3
