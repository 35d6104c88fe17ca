"""What `make test` leaves to `make test-all` and `make check`.

`make test` is to take ten minutes, so each promise has its cheapest real proof in it. A file or a
test is here when another test of `make test` would notice most of what it would.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_FAMILIES = "tests/contract/test_engine.py, which asks the embedded model"
_LANES = "integration/streams_and_lists_on_the_real_engine.py"
_SDK = "tests/contract/test_openai_bytes.py and integration/client_openai_sdk.py"
_ADAPTERS = "tests/contract/test_adapter_isolation.py"
_RESTARTS = "tests/server/test_failures.py and one restart in integration/engine_restart.py"
_FLEET = "integration/replicas_share_adapters.py"
_REQUIREMENTS = "test_requirements_are_there_when_the_model_is_ready of the same file"
_DRAIN = "tests/server/test_drain.py and integration/server_exit_cleans_up.py"
_ARGUMENTS = "tests/contract/test_configured_features.py, in vLLM's own configuration"
_COST = "tests/contract/test_cost_of_a_token.py, the other two lanes"
_CONSOLE = "tests/unit/features/console"
_CLEAN = "`make serve` itself, the first thing that anyone runs"

LONG: Final[Mapping[str, str]] = MappingProxyType({
    "tests/contract/test_cost_of_a_token.py::test_token_costs_no_more_than[chat]": _COST,
    "tests/contract/test_cost_of_a_token.py::test_token_costs_no_more_than[LMI, no logprobs]":
        _COST,
    "tests/contract/test_mapped_families.py": _FAMILIES,
    "tests/contract/test_bridge.py::test_script_of_the_model_is_not_vllm_s_to_run[vLLM-True]":
        "tests/contract/test_bridge.py, the same with our workaround",
    "tests/contract/test_not_finite.py::test_adapter_that_is_not_finite_costs_its_own_requests_only[1e+18]":
        "tests/contract/test_not_finite.py, the same with NaN",
    "tests/contract/test_not_finite.py::test_plain_vllm_corrupts_every_later_answer":
        "tests/contract/test_not_finite.py, the same with our workaround",
    "tests/contract/test_not_finite.py::test_speculative_decoding_ends_only_the_not_finite_request[draft_model]":
        "tests/contract/test_not_finite.py, the same with n-gram drafts",
    "tests/contract/test_pooling.py::test_gte_v15_matches_transformers[NewForSequenceClassification]":
        "tests/contract/test_pooling.py, the same model without a head",
    "tests/contract/test_pooling.py::test_their_relatives_match_transformers":
        "tests/contract/test_pooling.py, a model of each kind",
    "tests/contract/test_ray_backend.py": _ARGUMENTS,
    "tests/contract/test_token_lane.py::test_a_mixture_in_one_batch":
        "tests/contract/test_token_lane.py, one request at a time",
    "tests/contract/test_recorded_arguments.py::test_record_is_that_of_the_installed_release":
        "tests/contract/test_recorded_arguments.py, argument by argument",
    "tests/contract/test_speculative_arguments.py": "integration/engine_features.py",
    "tests/contract/test_vllm_routes.py::test_record_is_that_of_the_installed_release":
        "tests/contract/test_vllm_routes.py, over the application of this process",
    "tests/contract/test_workarounds.py::test_plain_vllm_starts_a_process_to_inspect_a_model_class":
        "tests/contract/test_workarounds.py, which applies and undoes each workaround",
    "integration/adapters_equal_merged_weights.py": _ADAPTERS,
    "integration/adapters_over_http.py::test_twenty_local_adapters_share_two_slots": _ADAPTERS,
    "integration/bare_machine.py": _CLEAN,
    "integration/bench_command.py": "tests/unit/features/bench",
    "integration/chaos.py": _RESTARTS,
    "integration/client_anthropic_sdk.py": "integration/client_coding_agent.py and " + _SDK,
    "integration/client_cohere_sdk.py": "tests/contract/test_pooling.py",
    "integration/client_huggingface_hub.py": "integration/tgi_clients_work_unchanged.py",
    "integration/client_langchain.py": _SDK,
    "integration/client_libraries.py": _SDK,
    "integration/client_litellm.py": _SDK,
    "integration/client_sagemaker_runtime.py": _LANES,
    "integration/compile_cache_is_kept.py": "tests/unit/features/compile_cache",
    "integration/console_in_a_browser.py": _CONSOLE,
    "integration/encoder_decoder_model.py": "tests/contract/test_transformers_engine.py",
    "integration/endurance.py": "tests/web/test_streams.py and tests/server/test_drain.py",
    "integration/engine_restart.py::test_stall_is_noticed_and_one_that_lasts_replaces_the_engine":
        "tests/server/features/test_watchdogs.py",
    "integration/engine_restart.py::test_stall_without_requests_ends_with_a_probe_token":
        "tests/server/features/test_watchdogs.py",
    "integration/engine_restart.py::test_engine_that_dies_while_it_comes_back_counts": _RESTARTS,
    "integration/fleet_behind_a_proxy.py": _FLEET,
    "integration/front_ends_are_forked.py": "tests/unit/features/front_ends/test_template.py",
    "integration/front_ends_share_one_engine.py::test_process_that_dies_is_replaced": _RESTARTS,
    "integration/front_ends_share_one_engine.py::test_the_death_of_the_engine_reaches_both":
        _RESTARTS,
    "integration/front_ends_share_one_engine.py::test_front_ends_end_with_the_first_process":
        _DRAIN,
    "integration/gpu_suite_without_a_gpu.py": "nothing: it is the suite of another machine",
    "integration/hub_model_starts_the_engine.py": "integration/models_without_network.py",
    "integration/images_in_messages.py": "tests/contract/test_media_guard.py",
    "integration/lmcache_on_the_real_engine.py": "tests/unit/features/lmcache",
    "integration/log_with_a_stalled_reader.py::test_lines_that_the_engine_drops_are_counted_by_the_server[spawn]":
        "the same with a forked engine, in integration/log_with_a_stalled_reader.py",
    "integration/mistral_tokenizers.py": "tests/unit/translate",
    "integration/models_equal_transformers.py": _FAMILIES,
    "integration/models_without_network.py::test_draft_model_and_tokenizer_of_other_places_are_fetched[hub-s3]":
        "the same with the places changed, in integration/models_without_network.py",
    "integration/nothing_stalls_while_serving.py::test_addresses_whose_grammars_were_slow_come_last":
        "tests/unit/features/grammar_trials/test_queue.py, and two addresses in the same file",
    "integration/openapi_fuzz.py": "tests/fuzz, and integration/same_as_vllm_serve.py",
    "integration/packages_install_clean.py": _CLEAN,
    "integration/parallel_ranks.py": "tests/unit/translate/test_parallel.py",
    "integration/prefill_and_decode.py": _ARGUMENTS,
    "integration/prometheus_scrapes_the_server.py": "integration/metrics_match_requests.py",
    "integration/ray_places_the_workers.py": _ARGUMENTS,
    "integration/real_models.py": _FAMILIES,
    "integration/real_tokenizers.py":
        "tests/contract/test_tokenizer_files.py, with small tokenizers of the same kinds",
    "integration/reasoning_and_tool_parsers.py": "integration/client_openai_sdk.py",
    "integration/requirements_are_installed.py::test_failed_requirements_are_named_when_an_import_fails":
        _REQUIREMENTS,
    "integration/requirements_are_installed.py::test_requirements_that_fail_do_not_stop_the_start":
        _REQUIREMENTS,
    "integration/sagemaker_sdk_requests.py": "tests/unit/test_sagemaker_examples.py",
    "integration/ray_serve.py": "tests/unit/features/ray_serve",
    "integration/ray_serve_gpus.py": "tests/unit/features/ray_serve/test_arguments.py",
    "integration/ray_serve_haproxy.py": "tests/unit/features/ray_serve",
    "integration/routers_of_caches.py":
        "integration/adapter_residency.py, which reads what these routers do",
    "integration/routers.py": "tests/web/test_open_signals.py and tests/unit/features/management",
    "integration/same_as_vllm_serve.py::test_answers_of_a_model_that_embeds_are_equal":
        "integration/embedding_model_answers.py and tests/contract/test_pooling.py",
    "integration/same_with_switches.py": "integration/same_as_vllm_serve.py, with the switches off",
    "integration/server_exit_cleans_up.py::test_sigkill_ends_the_engine_and_frees_the_port[spawn]":
        "the same with a forked engine, in integration/server_exit_cleans_up.py",
    "integration/sessions_over_replicas.py": "integration/sessions_survive_a_restart.py",
    "integration/sigterm_in_every_phase.py": _DRAIN,
    "integration/speculative_decoding.py": "integration/engine_features.py",
    "integration/speech_to_text.py": "tests/contract/test_multipart.py",
    "integration/started_as_vllm_serve.py::test_deployment_of_another_server":
        "the other test of the file, and tests/server/test_started_as_another_server.py",
    "integration/storm.py": _ADAPTERS,
    "integration/two_nodes.py": "tests/unit/features/nodes",
})  # fmt: skip

# Three quarters of the processor time of `tests/unit` and `tests/server`; `make check` runs them.
SLOW: Final[Mapping[str, str]] = MappingProxyType({
    "tests/server/test_statistics.py": "waits for statistics of an engine process",
    "tests/unit/config/test_any_text.py": "6,000 configurations are read and explained",
    "tests/unit/features/adapter_store/": "an S3 server",
    "tests/unit/features/adapters_state/": "an S3 server",
    "tests/unit/features/api_docs/": "the description is held to the schema of OpenAPI",
    "tests/unit/features/hub/": "a hub, and downloads that are killed",
    "tests/unit/features/image/": "processes of the image's entry point",
    "tests/unit/features/object_stores/": "an S3 server",
    "tests/unit/features/pickled_adapters/": "processes that read pickles",
    "tests/unit/features/requirements/": "pip",
    "tests/unit/features/sessions/test_shared.py": "an S3 server that hangs",
    "tests/unit/scripts/": "processes of pytest and of the linters",
    "tests/unit/test_documentation.py": "the site is built",
    "tests/unit/test_engine_starts.py": "processes of pytest",
    "tests/unit/test_imports_exist.py": "each import of each file is tried",
    "tests/unit/test_vllm_changes.py": "pip",
})  # fmt: skip


def is_slow(test: str) -> bool:
    """Whether `make unit` leaves out the test with this pytest id."""
    return test.startswith(tuple(SLOW))


# The slow tests that `make test` runs nevertheless (Makefile): nothing else holds their promises.
PROOFS: Final = (
    "tests/unit/features/adapter_store/test_bounds.py",
    "tests/unit/features/adapters_state/test_sharing.py",
)


def is_left_out(place: str) -> bool:
    """Whether `make test` runs nothing of a file, or of a folder."""
    if any(proof.partition("::")[0] == place for proof in PROOFS):
        return False
    return place in LONG or any(f"{place}/".startswith(f"{one.rstrip('/')}/") for one in SLOW)


def is_long(test: str) -> bool:
    """Whether `make test` leaves out the test with this pytest id."""
    file, _, name = test.partition("::")
    return file in LONG or test in LONG or f"{file}::{name.partition('[')[0]}" in LONG
