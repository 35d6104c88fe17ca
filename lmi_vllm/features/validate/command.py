"""`lmi-vllm validate`: explain, and the settings checked against the model's own config.json."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from lmi_vllm.checks.model_config import ModelFiles, read_directory
from lmi_vllm.checks.model_length import overridden
from lmi_vllm.commands.explain import (
    add_format_arguments,
    add_source_arguments,
    devices_of,
    reader_of,
    settings_of,
    translation_of,
    write_answer,
)
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.features.validate.memory_estimate import GIB, estimate_memory
from lmi_vllm.features.validate.model_checks import check_model
from lmi_vllm.features.validate.model_shape import read_shape
from lmi_vllm.host_memory import memory_place, total_host_memory
from lmi_vllm.messages import OriginKind
from lmi_vllm.sources.archives import is_archive
from lmi_vllm.translate.arguments import ModelReader, Translation
from lmi_vllm.translate.configuration import Configuration
from lmi_vllm.translate.devices import ask_nvidia_smi
from lmi_vllm.translate.explain import Explanation, formatted

_MIB: Final = 1 << 20
_SIZE: Final = "kv_cache_memory_bytes"
_SETTINGS_ALONE: Final = "the settings alone"
_CODE: Final = ("model.py", "requirements.txt")
_NVIDIA_SMI_SECONDS: Final = 5.0


def add_arguments(parser: argparse.ArgumentParser, _: Configuration) -> None:
    """Add this command's flags."""
    add_format_arguments(parser)
    parser.add_argument("--config", metavar="DIR", help="directory of the model's config.json")
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="memory of one GPU")
    add_source_arguments(parser)


def run(
    arguments: argparse.Namespace, environ: Mapping[str, str], configuration: Configuration
) -> int:
    """Print the explanation with the checks' results; returns 0, or 2 when there is an error."""
    settings = settings_of(arguments, environ, configuration)
    given_files = _files_in(Path(arguments.config)) if arguments.config else None
    read = reader_of(arguments, settings, environ, configuration, with_size=True)
    if given_files is not None:
        read = _reader_of(given_files)
    translation = translation_of(
        arguments, settings, environ, read, configuration, unnamed=given_files
    )
    files = given_files or _known(translation)
    memory = arguments.device_memory * GIB if arguments.device_memory else _device_bytes()
    memory = None if memory is None else int(memory)
    result = validate(translation, files, memory, configuration)
    if not devices_of(arguments, environ).gpu_count:
        result = replace(result, warnings=(*result.warnings, *_cpu_warnings(translation, files)))
    if files.config is not None:
        checked = _checked(translation, files, arguments.config, memory)
        result = replace(result, checked=tuple(checked))
    write_answer(formatted(result, arguments.format, is_whole=arguments.all))
    return result.exit_code


def validate(
    translation: Translation,
    files: ModelFiles,
    device_bytes: int | None,
    configuration: Configuration,
) -> Explanation:
    """Return the explanation with the findings of the checks and the memory estimate."""
    explanation, arguments = configuration.explain(translation), translation.arguments.values
    if files.config is None:
        others = tuple(one for one in explanation.warnings if one != files.unread_warning)
        is_said = any(files.problem in error for error in explanation.errors)
        faults = (*explanation.errors, *(() if is_said else (files.unread_warning,)))
        return replace(explanation, warnings=others, errors=faults, checked=(_SETTINGS_ALONE,))
    origin = translation.arguments.origin_of("hf_overrides")
    given = None if origin.kind is OriginKind.DERIVED else arguments.get("hf_overrides")
    shape = read_shape(overridden(files.config, given))
    findings = check_model(shape, arguments, configuration)
    estimate = estimate_memory(shape, arguments, files.weight_bytes, device_bytes)
    warnings, errors, memory = [*findings.warnings], [*findings.errors], ""
    if estimate is None:
        family = shape.family or "a model without a model_type"
        warnings.append(f"no memory estimate: layers or weights of {family} cannot be counted here")
    else:
        asked = arguments.get("max_model_len")
        length = asked if isinstance(asked, int) else None
        sentence = estimate.sentence(length, shape.longest)
        # An error only where it could not fit an otherwise empty device: the rest is an estimate.
        fits = estimate.can_hold(max(1, length or 1))
        (warnings if fits else errors).append(sentence)
        memory = sentence if fits else ""
    return replace(
        explanation,
        warnings=tuple(dict.fromkeys((*explanation.warnings, *warnings))),
        errors=tuple(dict.fromkeys((*explanation.errors, *errors))),
        memory=memory,
    )


def _cpu_warnings(translation: Translation, files: ModelFiles) -> Iterator[str]:
    """Yield that this machine is too small for what was set, if it is one without a GPU.

    A warning: the machine that serves may be another one.
    """
    arguments, total = translation.arguments, total_host_memory()
    size, weights = arguments.number(_SIZE, 0), files.weight_bytes or 0
    if size and total is not None and weights + size > total:
        yield (
            f"{_SIZE} ({size} from {arguments.origin_of(_SIZE)}): on a CPU this KV cache of "
            f"{size / GIB:.2f} GiB and weights of {weights / GIB:.2f} GiB are more than the "
            f"{total / GIB:.2f} GiB of {memory_place()}: a server does not start here"
        )


def _checked(
    translation: Translation, files: ModelFiles, folder: str | None, memory: int | None
) -> Iterator[str]:
    """Yield what was checked: an answer without errors says no more than this."""
    model = translation.model
    place = folder or (mask_urls(model.model) if model is not None else "")
    yield f"{len(translation.arguments.values)} engine arguments against config.json of {place}"
    if files.weight_bytes is not None:
        yield f"the size of its weights, {files.weight_bytes / GIB:.2f} GiB"
    if memory is None:
        yield "no GPU's memory: none is here, and --device-memory was not given"
    else:
        yield f"the memory of one GPU of {memory / GIB:.1f} GiB"
    directory = model.directory if model is not None else None
    for name in _CODE:
        if directory is not None and (directory / name).is_file():
            yield f"{directory / name}"


def _files_in(place: Path) -> ModelFiles:
    """Return the model's files in a folder, or beside the config.json that is named itself."""
    if place.name == "config.json" and place.is_file():
        place = place.parent
    if not place.is_dir():
        what = "is a file; --config names the folder of a config.json"
        return ModelFiles(problem=f"{place} {what if place.exists() else 'does not exist'}")
    files = read_directory(place)
    missing = files.config is None and not (place / "config.json").is_file()
    return ModelFiles(problem=f"{place} has no config.json") if missing else files


def _reader_of(files: ModelFiles) -> ModelReader:
    """Return a reader that gives `files` for any model."""
    return lambda _: files


def _known(translation: Translation) -> ModelFiles:
    """Return the model's files, with the reason in `problem` where they are not known."""
    files, model = translation.files, translation.model
    if model is None:
        return ModelFiles(problem="there is no model; set HF_MODEL_ID or use --model or --config")
    if files.config is not None or files.problem:
        return files
    reason = "is not local and --offline was given"
    if is_archive(model.model):
        reason = "is not unpacked yet"
    return ModelFiles(problem=f"{mask_urls(model.model)} {reason}")


def _device_bytes() -> int | None:
    """Return the bytes of the smallest GPU, from nvidia-smi; None without one."""
    lines = ask_nvidia_smi("gpu=memory.total", _NVIDIA_SMI_SECONDS)
    sizes = [int(line) for line in lines if line.isdigit()]
    return min(sizes) * _MIB if sizes else None
