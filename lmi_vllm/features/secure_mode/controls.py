"""SageMaker's secure mode: checks of a model directory, its options and its adapters.

Every check returns messages instead of raising, so that a refused start names all violations. Only
options that are set are checked (serving.properties and `OPTION_*`), not our own defaults.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.layers import of_file, option_aliases, option_variables
from lmi_vllm.config.model_source import find_in_store
from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.parsers import boolean
from lmi_vllm.config.setting import RawValue
from lmi_vllm.config.settings import FeatureSettings, Settings
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.sources.model_store import StoreFinding

SWITCH: Final = "SAGEMAKER_SECURE_MODE"
CONTROLS: Final = "SAGEMAKER_SECURITY_CONTROLS"
CHANNELS: Final = "SAGEMAKER_UNTRUSTED_CHANNELS"

NO_REMOTE_CODE: Final = "DISALLOW_TRUST_REMOTE_CODE"
NO_SCRIPTS: Final = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
NO_REQUIREMENTS: Final = "DISALLOW_REQUIREMENTS_TXT"
NO_PICKLES: Final = "DISALLOW_PICKLE_FILES"
NO_CHAT_TEMPLATE: Final = "DISALLOW_CHAT_TEMPLATE"
KNOWN_CONTROLS: Final = (
    NO_REMOTE_CODE, NO_SCRIPTS, NO_REQUIREMENTS, NO_PICKLES, NO_CHAT_TEMPLATE,
)  # fmt: skip

PYTHONS: Final = ("/usr/bin/python3", "/opt/djl/vllm_venv/bin/python")
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TEMPLATE_FILES: Final = ("chat_template.jinja", "chat_template.json")
# Of a processor, too; all values of the last become the tokenizer's.
TEMPLATE_CONFIGS: Final = (
    "tokenizer_config.json", "processor_config.json", "special_tokens_map.json",
)  # fmt: skip
TEMPLATE_FOLDER: Final = "additional_chat_templates"
_OWN_ENTRY_POINTS: Final = "djl_python."
_FORBIDDEN_NAMES: Final = (("model.py", NO_SCRIPTS), ("requirements.txt", NO_REQUIREMENTS))
# The keys that secure mode lets a model directory set; nothing else passes.
_SERVER_KEYS: Final = (
    "engine", "job_queue_size", "max_idle_time", "batch_size", "max_batch_delay",
    "max_dynamic_batch_size", "minWorkers", "maxWorkers", "load_on_devices",
)  # fmt: skip
_OPTIONS: Final = """
    mpi_mode entryPoint task model_id batch_size tensor_parallel_degree pipeline_parallel_degree
    rolling_batch dtype trust_remote_code revision max_rolling_batch_size parallel_loading
    model_loading_timeout output_formatter n_positions load_in_8bit unroll context_length_estimate
    low_cpu_mem_usage load_split_model compiled_graph_path group_query_attention
    enable_mixed_precision_accumulation enable_saturate_infinity speculative_draft_model
    speculative_length draft_model_compiled_path draft_model_tp_size quantize
    max_rolling_batch_prefill_tokens max_model_len load_format enforce_eager
    gpu_memory_utilization record_acceptance_rate enable_lora max_loras max_lora_rank
    lora_extra_vocab_size max_cpu_loras max_input_len max_output_len max_num_tokens
    use_custom_all_reduce tokens_per_block batch_scheduler_policy kv_cache_free_gpu_mem_fraction
    max_num_sequences enable_trt_overlap enable_kv_cache_reuse baichuan_model_version
    chatglm_model_version gpt_model_version multi_block_mode use_fused_mlp rotary_base rotary_dim
    rotary_scaling_type rotary_scaling_factor logits_dtype trtllm_checkpoint_path load_by_shard
    smoothquant_alpha smoothquant_per_token smoothquant_per_channel multi_query_mode awq_format
    awq_calib_size q_format calib_size calib_batch_size use_fp8_context_fmha
    enable_chunked_prefill cpu_offload_gb_per_gpu enable_prefix_caching disable_sliding_window
    enable_streaming tgi_compat pythonExecutable
"""
ALLOWED_KEYS: Final = frozenset((*_SERVER_KEYS, *(f"option.{name}" for name in _OPTIONS.split())))


class SecureModeSettings(FeatureSettings):
    """What secure mode checks."""

    # fmt: off
    sagemaker_security_controls: list[str] | None = variable(parse.words,
        "The checks of secure mode.", values="list")
    sagemaker_untrusted_channels: list[str] | None = variable(parse.words,
        "Directories secure mode scans.", values="list")
    # fmt: on


@dataclass(frozen=True, slots=True)
class SecureMode:
    """The controls that are on, and the directories whose files are not trusted."""

    controls: frozenset[str]
    channels: tuple[Path, ...]

    def forbids(self, control: str) -> bool:
        """Whether `control` is on."""
        return control in self.controls


def read_secure_mode(settings: Settings) -> SecureMode | None:
    """Return secure mode as it is set; None where it is off."""
    if not settings.server.sagemaker_secure_mode:
        return None
    own = settings.feature(SecureModeSettings)
    channels = tuple(map(Path, own.sagemaker_untrusted_channels or ()))
    return SecureMode(frozenset(own.sagemaker_security_controls or ()), channels)


class SageMakerSecurity:
    """The checks of secure mode; each returns a message for a violation, none where it is off."""

    def __init__(self, options: OptionTable) -> None:
        self._options = options

    def start_violations(
        self, settings: Settings, environ: Mapping[str, str], directory: Path | None
    ) -> tuple[str, ...]:
        """Return the violations of a start; `directory` is the model's, if there is one."""
        mode = read_secure_mode(settings)
        if mode is None:
            return ()
        if not mode.controls:
            return (f"{SWITCH} is on and {CONTROLS} is not set: it names the checks, out of "
                    f"{', '.join(KNOWN_CONTROLS)}",)  # fmt: skip
        written = tuple(_written_values(settings, environ, self._options))
        violations = [
            *_control_names(mode), *_unlisted(written), *_python(settings),
            *(text for feature in settings.features for text in feature.forbidden_in_secure_mode()),
            *_remote_code(mode, written), *_entry_point(mode, settings),
            *_model_directory(mode, directory), *_channels(mode, find_in_store(settings, environ)),
        ]  # fmt: skip
        for folder in _adapter_folders(settings, directory):
            violations += _adapter(mode, folder)
        return tuple(dict.fromkeys(violations))

    def adapter_violations(self, settings: Settings, folder: Path) -> tuple[str, ...]:
        """Return the violations in the folder of one adapter."""
        mode = read_secure_mode(settings)
        return () if mode is None else tuple(_adapter(mode, folder))


def _control_names(mode: SecureMode) -> Iterator[str]:
    """Yield a violation for each unknown control, which would have no effect."""
    for name in sorted(mode.controls.difference(KNOWN_CONTROLS)):
        yield f"{CONTROLS}: {name} is no known check; known are {', '.join(KNOWN_CONTROLS)}"


def _written_values(
    settings: Settings, environ: Mapping[str, str], options: OptionTable
) -> Iterator[RawValue]:
    """Yield every value written for the model, those included that another source overrides."""
    file = settings.properties
    if file is not None and not Path(file.path).is_relative_to(DEMO_MODEL_DIR):
        yield from of_file(file)
    yield from option_variables(environ, options)
    yield from option_aliases(environ)


def _unlisted(written: Iterable[RawValue]) -> Iterator[str]:
    for raw in written:
        if raw.key not in ALLOWED_KEYS:
            yield f"{raw.key} ({raw.origin}) is not among the options of secure mode"


def _python(settings: Settings) -> Iterator[str]:
    setting = settings.model.details.python_executable
    if setting.is_set and setting.value not in PYTHONS:
        yield f"{setting.stated} is not allowed in secure mode: only {' and '.join(PYTHONS)} are"


def _remote_code(mode: SecureMode, written: Iterable[RawValue]) -> Iterator[str]:
    """Yield each value that asks for remote code, also one that another source overrides."""
    if not mode.forbids(NO_REMOTE_CODE):
        return
    for raw in written:
        if raw.key == "option.trust_remote_code" and _may_be_true(raw.text):
            yield f"{raw.key}={raw.text} ({raw.origin}) is forbidden by {NO_REMOTE_CODE}"


def _may_be_true(text: str) -> bool:
    try:
        return boolean(text)
    except ValueError:
        return True


def _entry_point(mode: SecureMode, settings: Settings) -> Iterator[str]:
    file = settings.model.entry_point  # none for upstream's own handlers, which vLLM stands for
    if file is None or not mode.forbids(NO_SCRIPTS):
        return
    if not file.startswith(_OWN_ENTRY_POINTS):
        allowed = f"only those that begin with {_OWN_ENTRY_POINTS} are allowed"
        stated = settings.model.details.entry_point.stated
        yield f"{stated} is forbidden by {NO_SCRIPTS}: {allowed}"


def _model_directory(mode: SecureMode, directory: Path | None) -> Iterator[str]:
    """Yield forbidden files; a model.py counts with any entry point: its hooks are loaded too."""
    if directory is None:
        return
    for name, control in _FORBIDDEN_NAMES:
        if mode.forbids(control) and os.path.lexists(directory / name):
            yield f"{directory / name} is forbidden by {control}"


def _channels(mode: SecureMode, finding: StoreFinding) -> Iterator[str]:
    """Yield violations in the channels, and in the folder unpacked from an archive in one."""
    for channel in mode.channels:
        if not channel.is_dir():
            yield f"{CHANNELS}: {channel} is not a directory"
            continue
        yield from _untrusted_files(mode, channel)
        packed, folder = finding.archive, finding.directory
        if packed and folder and packed.resolve().is_relative_to(channel.resolve()):
            yield from _untrusted_files(mode, folder)


def _adapter_folders(settings: Settings, directory: Path | None) -> Iterator[Path]:
    """Yield the folders of the adapters that a start loads by itself."""
    folder = directory / settings.model.adapters if directory else None
    if folder is not None and folder.is_dir():
        yield from sorted(child for child in folder.iterdir() if child.is_dir())


def _adapter(mode: SecureMode, folder: Path) -> Iterator[str]:
    try:
        for path in _files(folder):
            for name, control in _FORBIDDEN_NAMES:
                if mode.forbids(control) and path.name == name:
                    yield f"{path} is forbidden by {control}"
    except OSError as error:
        yield _unsearched(folder, error)
    else:
        yield from _untrusted_files(mode, folder)


def _untrusted_files(mode: SecureMode, folder: Path) -> Iterator[str]:
    try:
        for path in _files(folder):
            is_pickle = path.name.lower().endswith(PICKLE_SUFFIXES)
            if mode.forbids(NO_PICKLES) and is_pickle:
                yield f"{path} is forbidden by {NO_PICKLES}"
            if mode.forbids(NO_CHAT_TEMPLATE) and _is_template(path):
                yield f"{path} is forbidden by {NO_CHAT_TEMPLATE}"
    except OSError as error:  # a folder that cannot be read fails the check
        yield _unsearched(folder, error)


def _unsearched(folder: Path, error: OSError) -> str:
    return f"{error.filename or folder} cannot be searched: {error.strerror}"


def _is_template(path: Path) -> bool:
    """Whether a file is a chat template, or a tokenizer's or processor's settings with one."""
    if path.name in TEMPLATE_FILES:
        return True
    if path.parent.name == TEMPLATE_FOLDER and path.suffix == ".jinja":
        return True
    if path.name not in TEMPLATE_CONFIGS:
        return False
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    return not isinstance(config, dict) or "chat_template" in config


def _files(folder: Path) -> Iterator[Path]:
    """Yield every file below `folder`, links to directories followed, each directory once.

    Raises:
        OSError: a directory cannot be read.
    """

    def stop(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for root, directories, names in os.walk(folder, onerror=stop, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            directories.clear()
            continue
        seen.add(real)
        directories.sort()
        yield from (Path(root, name) for name in sorted(names))
