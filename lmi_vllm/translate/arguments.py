"""`Settings` + model + devices -> one `Translation`, made once for a start, without vLLM.

Rows of the option table that map one to one are put here. Each rule is a function in rules.py or
parallel.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.model import (
    checkpoint_errors,
    checkpoint_warnings,
    read_checkpoint,
    unsupported_quantization,
)
from lmi_vllm.checks.model_config import ModelFiles, read_local_files
from lmi_vllm.config.model_source import locate_model
from lmi_vllm.config.options.row import EffectWord, Option
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import Settings
from lmi_vllm.config.variable_names import find_option
from lmi_vllm.errors import ModelSourceError, NoModelError
from lmi_vllm.extension import extensions
from lmi_vllm.messages import (
    DEFAULT_ORIGIN,
    EngineArguments,
    ModelArtifacts,
    Origin,
    OriginKind,
    ServingProfile,
)
from lmi_vllm.sources.local import is_directory, is_file
from lmi_vllm.translate import parallel
from lmi_vllm.translate import rules as engine_rules
from lmi_vllm.translate.devices import Devices
from lmi_vllm.translate.draft import ArgumentDraft, Rule
from lmi_vllm.translate.heads import offer_sizes, refuse_size
from lmi_vllm.translate.model_files import CHECKPOINT_RULES
from lmi_vllm.translate.serving_profile import build_serving_profile

# What is known of a model's files before they are fetched.
ModelReader = Callable[[ModelArtifacts], ModelFiles]

# The order matters only if a rule reads arguments that an earlier one sets.
_RULES: Final[tuple[Rule, ...]] = (
    engine_rules.model_dir,
    engine_rules.load_format,
    engine_rules.tokenizer_mode,
    engine_rules.task,
    engine_rules.batch_sizes,
    engine_rules.quantization,
    engine_rules.lora,
    engine_rules.adapter_format,
    engine_rules.parsers,
    engine_rules.remote_code,
    engine_rules.entry_point,
)


@dataclass(frozen=True, slots=True)
class Translation:
    """The meaning of the settings; `explain`, `validate` and the start use the same one.

    `arguments` are the engine's, as far as they could be built. `profile` is for request handling.
    `missing` says why there is no model although one is needed. `files` is what was known of its
    files.
    """

    settings: Settings
    model: ModelArtifacts | None
    devices: Devices
    arguments: EngineArguments
    profile: ServingProfile
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    missing: ModelSourceError | None = None
    files: ModelFiles = field(default_factory=ModelFiles)


def translate_start(
    settings: Settings,
    environ: Mapping[str, str],
    devices: Devices,
    read: ModelReader = read_local_files,
) -> Translation:
    """The translation for the configured model, with all errors of both.

    `read` returns the model's config.json, so that arguments which it excludes are errors before
    the weights are fetched. A missing model is no error of the configuration; it is only in
    `missing`.
    """
    model, missing = None, None
    try:
        model = locate_model(settings, environ)
    except ModelSourceError as error:
        missing = error
    files = ModelFiles() if model is None else read(model)
    translation = translate(settings, model, devices, files)
    is_fault = missing is not None and not isinstance(missing, NoModelError)
    is_unread = bool(files.problem) and model is not None and not is_directory(model.model)
    unread = (files.unread_warning,) if is_unread else ()
    warnings = (*translation.warnings, *unread, *_archive_warnings(model))
    return replace(
        translation,
        warnings=(*settings.warnings, *warnings),
        errors=(*settings.errors, *([str(missing)] if is_fault else []), *translation.errors),
        missing=missing,
        files=files,
    )


def _archive_warnings(model: ModelArtifacts | None) -> tuple[str, ...]:
    """The warning that a model in an archive is not checked before it is unpacked."""
    if model is None or model.directory is not None or not is_file(model.model):
        return ()
    return (f"{model.model} is unpacked when the server starts: the serving.properties that may "
            f"be in it is not shown here",)  # fmt: skip


def translate(
    settings: Settings,
    model: ModelArtifacts | None,
    devices: Devices,
    files: ModelFiles | None = None,
) -> Translation:
    """The translation for a known model; raises nothing.

    Without `files` those of a local model count. Errors in `settings.errors` are not repeated.
    """
    if files is None:
        files = ModelFiles() if model is None else read_local_files(model)
    draft = ArgumentDraft(settings, model, devices, config=files.config or {})
    _put_model(draft)
    _put_plain(draft)
    for rule in (*_RULES, *extensions(lambda extra: extra.rules)):
        rule(draft)
    for rule in extensions(lambda extra: extra.fallback_rules):
        rule(draft)
    _put_defaults(draft)
    offer_sizes(draft)
    for rule in extensions(lambda extra: extra.placement_rules):
        rule(draft)
    parallel.assign_devices(draft)
    for rule in extensions(lambda extra: extra.late_rules):
        rule(draft)
    return _with_checkpoint_rules(draft)


def _put_model(draft: ArgumentDraft) -> None:
    """The model as the engine gets it."""
    model, model_id = draft.model, draft.settings.model.details.model_id
    if model is None:
        return
    origin = model_id.origin
    if not model_id.is_set and model.directory is not None:
        origin = Origin(OriginKind.DERIVED, str(model.directory))
    draft.put("model", model.model, origin)


def mapped_rows(draft: ArgumentDraft) -> list[tuple[Setting, Option | None]]:
    """Every option that is set and maps, with its row; arguments of vLLM have none."""
    own = [(one, find_option(one.name)) for one in draft.settings.model.details.values()]
    brought = [
        (one, row)
        for extra in draft.settings.extras
        for one in extra.details.values()
        if (row := find_option(one.name))
    ]
    return [
        (setting, row)
        for setting, row in (*own, *brought)
        if setting.effect == EffectWord.MAPS_TO and setting.is_set
    ]


def _put_plain(draft: ArgumentDraft) -> None:
    """Set options that become their argument unchanged, passed-through ones included."""
    for setting, row in mapped_rows(draft):
        if row is None or not (row.effect.is_computed or row.effect.is_fallback):
            draft.put(setting.targets[0], setting.value, setting.origin)


def _put_defaults(draft: ArgumentDraft) -> None:
    """Set the arguments that LMI always passes."""
    for setting in draft.settings.model.details.values():
        row = find_option(setting.name)
        if setting.is_set or row is None or setting.effect != EffectWord.MAPS_TO:
            continue
        if not (row.effect.is_computed or row.effect.is_fallback):
            draft.put_if_unset(setting.targets[0], setting.value, DEFAULT_ORIGIN)
    draft.put_if_unset("revision", None, DEFAULT_ORIGIN)


def translate_checkpoint(
    settings: Settings, model: ModelArtifacts, devices: Devices, arguments: EngineArguments
) -> Translation:
    """The translation of a model that was just fetched: applies the rules that read its files."""
    draft = ArgumentDraft(
        settings,
        model,
        devices,
        dict(arguments.values),
        dict(arguments.origins),
        config=read_local_files(model).config or {},
    )
    return _with_checkpoint_rules(draft)


def _with_checkpoint_rules(draft: ArgumentDraft) -> Translation:
    """The translation of `draft`, after the rules that read the model's config.json."""
    own = (refuse_size, *CHECKPOINT_RULES)
    for rule in (*extensions(lambda extra: extra.checkpoint_rules), *own):
        rule(draft)
    shape = read_checkpoint(draft.config)
    draft.errors += unsupported_quantization(shape)
    if draft.config:
        draft.errors += checkpoint_errors(shape, draft.values, has_gpus=draft.devices.gpu_count > 0)
    if draft.config and isinstance(draft.values.get("quantization"), str):
        draft.warnings += checkpoint_warnings(shape, draft.values)
    arguments = EngineArguments(
        MappingProxyType(dict(draft.values)),
        MappingProxyType(dict(draft.origins)),
        draft.architectures,
    )
    profile = build_serving_profile(draft.settings, draft.model, arguments)
    return Translation(
        draft.settings,
        draft.model,
        draft.devices,
        arguments,
        profile,
        tuple(draft.warnings),
        tuple(draft.errors),
    )
