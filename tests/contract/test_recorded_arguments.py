"""Our record of arguments is the installed vLLM's, and our reading of texts its command line's."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.config.options.row import EffectWord
from lmi_vllm.config.vllm_schema import coerce, load_release
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.messages import EngineArguments
from tests.support.assembled import OPTIONS
from tests.support.vllm_namespace import namespace_of

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "record_vllm_arguments.py"

TEXTS = (
    ("max_model_len", "8k"), ("max_model_len", "4K"), ("max_model_len", "auto"),
    ("max_num_batched_tokens", "25.6k"), ("kv_cache_memory_bytes", "64M"), ("seed", "7"),
    ("gpu_memory_utilization", "0.5"), ("quantization", "None"), ("dtype", "bfloat16"),
    ("served_model_name", "a,b"), ("cudagraph_capture_sizes", "1,2"), ("device_ids", "0,x"),
    ("speculative_config", '{"method": "ngram"}'), ("hf_overrides", '{"a": 1}'),
    ("hf_overrides", "module.function"), ("limit_mm_per_prompt", '{"image": 4}'),
    ("override_generation_config", '{"top_p": 0.5}'), ("moe_backend", "Triton"),
    ("max_lora_rank", "16"), ("kv_cache_dtype", "fp8"), ("max_num_queued_reqs", "5"),
    ("optimization_level", "2"), ("ignore_patterns", "a,b"), ("safetensors_load_strategy", "lazy"),
)  # fmt: skip
BOOLEANS = ("enforce_eager", "enable_prefix_caching", "async_scheduling", "trust_remote_code")


@pytest.fixture(scope="module")
def parser() -> Any:
    """VLLM's own command line."""
    vllm_engine = pytest.importorskip("vllm.engine.arg_utils")
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    return vllm_engine.AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))


def test_record_is_that_of_the_installed_release() -> None:
    """A release that renames an argument shows up as a diff of the record."""
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_text_is_read_as_on_vllms_command_line(name: str, text: str, parser: Any) -> None:
    """The same value and type from our record as from vLLM's parser."""
    flag = f"--{name.replace('_', '-')}"
    argument = load_release().engine[name]
    given = [flag, *text.split(",")] if argument.is_list else [f"{flag}={text}"]
    theirs = getattr(parser.parse_args(given), name)
    ours = coerce(argument, text)
    assert ours == theirs
    assert type(ours) is type(theirs)


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans_are_vllms_switches(name: str, parser: Any) -> None:
    """`true` is --x and `false` is --no-x."""
    flag = name.replace("_", "-")
    argument = load_release().engine[name]
    assert getattr(parser.parse_args([f"--{flag}"]), name) is coerce(argument, "true")
    assert getattr(parser.parse_args([f"--no-{flag}"]), name) is coerce(argument, "FALSE")


def test_every_switch_reaches_vllm_on_and_off() -> None:
    """Both values of each arrive: no release's way to write `off` is lost, as 0.33's was."""
    names = [name for name, row in load_release().engine.items() if row.kind == "bool"]
    assert len(names) > 50
    for value in (True, False):
        parsed = vars(namespace_of(dict.fromkeys(names, value)))
        assert {name: parsed[name] for name in names if parsed[name] is not value} == {}


CONFIGS = (
    ("compilation_config", '{"mode": 0, "cudagraph_capture_sizes": [1, 2]}'),
    ("kv_transfer_config", '{"kv_connector": "x", "kv_role": "kv_both", "engine_id": "e"}'),
    ("structured_outputs_config", '{"backend": "xgrammar"}'), ("pooler_config", "{}"),
    ("profiler_config", '{"profiler": "torch", "torch_profiler_dir": "/tmp"}'),
    ("attention_config", '{"backend": "CPU_ATTN"}'), ("attention_backend", "CPU_ATTN"),
    ("quantization_config", '{"linear": {"weight": "fp8_per_tensor_static"}}'),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [*TEXTS, *CONFIGS])
def test_value_is_handed_on_as_the_command_line_has_it(name: str, text: str, parser: Any) -> None:
    """Without being written as flags again: what vLLM gets is what its parser makes of the text."""
    if (name, text) == ("hf_overrides", "module.function"):
        return  # vLLM takes it from the command line, and refuses it later
    flag = f"--{name.replace('_', '-')}"
    argument = load_release().engine[name]
    given = [flag, *text.split(",")] if argument.is_list else [f"{flag}={text}"]
    theirs = getattr(parser.parse_args(given), name)
    ours = getattr(namespace_of({name: coerce(argument, text)}), name)
    assert repr(ours) == repr(theirs)


def test_devices_that_we_choose_arrive_as_numbers() -> None:
    """As flag text a list of them was `[0, 1]`, and its ends no numbers."""
    assert namespace_of({"device_ids": [0, 1]}).device_ids == [0, 1]


def test_every_target_of_the_option_table_is_a_field() -> None:
    """Each `maps_to` names an argument vLLM has."""
    engine = load_release().engine
    for row in OPTIONS.rows.options:
        if row.effect.word is EffectWord.MAPS_TO:
            assert set(row.effect.targets) <= set(engine), row.name


class Counted(Mapping[str, object]):
    """An argument's value that counts how often it is read."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values_read, self._values = 0, values

    def __getitem__(self, name: str) -> object:
        self.values_read += 1
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


def test_arguments_that_were_checked_are_not_read_again() -> None:
    """A start reads those that differ: the model's path, and what was added for the machine."""
    from lmi_vllm.engine.vllm.configuration import VllmArguments  # noqa: PLC0415 (imports vLLM)

    values = {"model": "/fetched", "compilation_config": Counted({"mode": 0}), "seed": 3}
    checked = VllmArguments.of(EngineArguments({**values, "model": ".", "revision": "main"}))
    was_read = values["compilation_config"].values_read
    read = VllmArguments.of(EngineArguments({**values, "max_num_seqs": 7}), checked)
    assert values["compilation_config"].values_read == was_read > 0
    assert (read.namespace.model, read.namespace.max_num_seqs) == ("/fetched", 7)
    assert read.namespace.revision is None, "it is no argument any more"
    kept, first = read.namespace.compilation_config, checked.namespace.compilation_config
    assert kept == first
    assert kept is not first, "vLLM changes its own"
    with pytest.raises(ConfigurationError, match=r"max_num_seqs .*refuses 'many'"):
        VllmArguments.of(EngineArguments({**values, "max_num_seqs": "many"}), checked)
