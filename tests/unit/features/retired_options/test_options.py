"""What older names become, and why others have no effect; without this feature they are unknown."""

import pytest

from lmi_vllm.config.options.row import EffectWord, Option, Rows
from lmi_vllm.features.retired_options.options import (
    DroppedArguments,
    ForeignOptions,
    UnusedNames,
)
from tests.support.assembled import load_settings
from tests.unit.config.test_option_tables import ABSENT, Row, check_row
from tests.unit.conftest import ExplainRun

ALL = (*ForeignOptions.rows, *DroppedArguments.rows, *UnusedNames.rows)
ROWS = Rows.of(row for row in ALL if row.effect.word in (EffectWord.WARNS, EffectWord.NONE))


@pytest.mark.parametrize("row", ROWS.options, ids=lambda row: row.name)
def test_option_is_warned_with_its_reason(row: Option) -> None:
    """As an option, once."""
    (warning,) = load_settings({f"OPTION_{row.name.upper()}": "7"}).warnings
    assert warning == f"option.{row.name} (OPTION_{row.name.upper()}) has no effect: " + (
        row.effect.text
    )
    (unknown,) = load_settings({f"OPTION_{row.name.upper()}": "7"}, kinds=()).warnings
    assert "is not known and has no effect" in unknown


# Arguments of vLLM 0.6.3 that LMI's guides name, written out: a row that is deleted is noticed.
ARGUMENTS_OF_0_6_3 = (
    "speculative_model_quantization", "speculative_disable_mqa_scorer",
    "speculative_draft_tensor_parallel_size", "speculative_max_model_len",
    "speculative_disable_by_batch_size", "spec_decoding_acceptance_method",
    "typical_acceptance_sampler_posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha", "disable_logprobs_during_spec_decoding",
    "override_neuron_config",
)  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS_OF_0_6_3)
def test_argument_of_an_old_vllm_is_known_as_dropped(name: str) -> None:
    """None of them is merely unknown."""
    (warning,) = load_settings({f"OPTION_{name.upper()}": "7"}).warnings
    assert "is not known" not in warning
    assert "has no effect" in warning


CAPTURE = "cudagraph_capture_sizes"
CASES = (
    Row("paged_attention", "true"),
    Row("paged_attention", "false", warns=True),
    *(
        Row(name, "7", warns=True, warns_with=CAPTURE)
        for name in ("max_seq_len_to_capture", "max_context_len_to_capture", "cuda_graph_sizes")
    ),
    Row("triangular_masking", "true", warns=True),
    Row("swap_space", "7", warns=True),
    Row("max_tokens", "2048", {"max_model_len": 2048}, warns=True),
    Row("max_tokens", "2048", {"max_model_len": 512}, warns=True, also="option.max_model_len=512"),
    Row("enable_cuda_graph", "false", {"enforce_eager": True}),
    Row("enable_cuda_graph", "true", {"enforce_eager": False}),
    Row("enable_cuda_graph", "true", {"enforce_eager": True}, warns=True,
        also="option.enforce_eager=true"),
    Row("n_positions", "1024", {"max_model_len": 1024}, warns=True),
    Row("load_split_model", "true", fails="Hugging Face"),
    Row("load_split_model", "false"),
    Row("max_input_len", "100", {"max_model_len": -1}, warns=True),
    Row("max_output_len", "100", {"max_model_len": -1}, warns=True),
    Row("max_input_len", "100", {"max_model_len": 300}, warns=True,
        also="option.max_output_len=200"),
    Row("max_num_tokens", "4096", {"max_num_batched_tokens": 4096}, warns=True),
    Row("max_num_sequences", "12", {"max_num_seqs": 12}),
    Row("kv_cache_free_gpu_mem_fraction", "0.7", {"gpu_memory_utilization": 0.7}, warns=True),
    Row("use_custom_all_reduce", "false", {"disable_custom_all_reduce": True}),
    Row("use_custom_all_reduce", "true", {"disable_custom_all_reduce": ABSENT}),
    Row("tokens_per_block", "32", {"block_size": 32}, warns=True),
    Row("disable_log_requests", "true", {"enable_log_requests": False}),
    Row("disable_log_requests", "false", {"enable_log_requests": True}),
    Row("rope_scaling", '{"type": "yarn"}', {"hf_overrides": {"rope_scaling": {"type": "yarn"}}}),
    Row("rope_theta", "5000", {"hf_overrides": {"rope_theta": 5000.0}}),
    Row("rope_theta", "5000", {"hf_overrides": {"a": 1}}, warns=True,
        also='option.hf_overrides={"a": 1}'),
    Row("guided_decoding_backend", "xgrammar",
        {"structured_outputs_config": {"backend": "xgrammar"}}),
    Row("override_pooler_config", '{"normalize": false}', {"pooler_config": {"normalize": False}}),
    Row("worker_use_ray", "true", {"distributed_executor_backend": "ray"}),
    Row("worker_use_ray", "false", {"distributed_executor_backend": ABSENT}),
    Row("collect_detailed_traces", "all", {"collect_detailed_traces": ["all"]}),
    Row("collect_detailed_traces", "yes", {"collect_detailed_traces": ABSENT}, warns=True),
)  # fmt: skip


@pytest.mark.parametrize("row", CASES, ids=lambda row: row.id)
def test_option_in_a_file(row: Row, explained: ExplainRun) -> None:
    """As `explain` shows it; a value that asks for what is always so draws no word."""
    check_row(row, explained)


def test_it_stays_a_warning_in_strict_mode(explained: ExplainRun) -> None:
    """Strict means unknown names only."""
    run = explained("option.swap_space=4", "", "--strict")
    assert (run.exit_code, len(run.warnings)) == (0, 1)


@pytest.mark.parametrize("row", ROWS.server, ids=lambda row: row.name)
def test_java_server_key_is_silently_accepted(row: Option) -> None:
    """Its files are full of them."""
    environ = {f"SERVING_{row.name.upper()}": "7"}
    assert load_settings(environ).warnings == ()
    assert len(load_settings(environ, kinds=()).warnings) == 1


def test_retired_options_have_no_effect() -> None:
    """What has one belongs to the core, or to the feature that reads it."""
    rows = (*ROWS.options, *ROWS.server)
    assert {row.effect.word for row in rows} == {EffectWord.WARNS, EffectWord.NONE}
    assert not ROWS.variables


def test_lengths_of_tensorrt_llm_add_up(explained: ExplainRun) -> None:
    """One word is said for the two."""
    run = explained("option.max_input_len=1024\noption.max_output_len=512")
    assert (run.engine_args["max_model_len"], len(run.warnings)) == (1536, 1)


def test_ray_by_its_old_option_name_places_the_model(explained: ExplainRun) -> None:
    """Its nodes may have the GPUs that this one lacks."""
    run = explained("option.worker_use_ray=true\noption.tensor_parallel_degree=16")
    assert (run.errors, run.engine_args["tensor_parallel_size"]) == ([], 16)
