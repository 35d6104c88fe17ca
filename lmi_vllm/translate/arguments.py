"""`Settings` + model + devices -> one `Translation`, made once for a start, without vLLM.

Rows of the option table that map one to one are put here. Every other argument comes from a rule.
A rule runs in the phase in which what it reads is known (`RulePhase`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.model import (
    OwnEngines,
    checkpoint_errors,
    checkpoint_warnings,
    misstated_quantization,
    read_checkpoint,
    unsupported_quantization,
)
from lmi_vllm.checks.model_config import ModelFiles, read_local_files
from lmi_vllm.config.model_source import locate_model
from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.options.row import EffectWord, Option
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import ModelSourceError, NoModelError
from lmi_vllm.messages import (
    DEFAULT_ORIGIN,
    EngineArguments,
    ModelArtifacts,
    Origin,
    OriginKind,
    ServingProfile,
)
from lmi_vllm.sources.local import is_directory, is_file
from lmi_vllm.sources.table import Sources
from lmi_vllm.translate import rules as engine_rules
from lmi_vllm.translate.cpu_cache import put_cpu_cache
from lmi_vllm.translate.devices import Devices
from lmi_vllm.translate.draft import ArgumentDraft, Rule, RulePhase
from lmi_vllm.translate.model_files import CHECKPOINT_RULES
from lmi_vllm.translate.model_paths import named_adapters, named_files, named_models
from lmi_vllm.translate.parallel import assign_devices, offer_sizes, refuse_size
from lmi_vllm.translate.rules import compile_if_possible
from lmi_vllm.translate.serving_profile import build_serving_profile
from lmi_vllm.translate.sleep import put_sleep

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


def _archive_warnings(model: ModelArtifacts | None) -> tuple[str, ...]:
    """The warning that a model in an archive is not checked before it is unpacked."""
    if model is None or model.directory is not None or not is_file(model.model):
        return ()
    return (f"{model.model} is unpacked when the server starts: the serving.properties that may "
            f"be in it is not shown here",)  # fmt: skip


def _absent(files: ModelFiles, settings: Settings) -> str:
    """The error of a model that is not there, with what names it."""
    named = settings.model.details.model_id
    return f"option.model_id ({named.origin}): {files.problem}" if named.is_set else files.problem


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
    own = [(one, draft.options.find(one.name)) for one in draft.settings.model.details.values()]
    brought = [
        (one, row)
        for feature in draft.settings.features
        for one in feature.details.values()
        if (row := draft.options.find(one.name))
    ]
    return [
        (setting, row)
        for setting, row in (*own, *brought)
        if setting.effect == EffectWord.MAPS_TO and setting.is_set
    ]


def _put_fallbacks(draft: ArgumentDraft) -> None:
    """Set arguments from other backends' options, if nothing else sets them."""
    for setting, row in mapped_rows(draft):
        if row is None or not row.effect.is_fallback:
            continue
        (target,) = setting.targets
        if target in draft.values:
            draft.warn(f"{setting.label} has no effect: {draft.label(target)} is set", setting)
            continue
        draft.put(target, setting.value, setting.origin)
        if row.effect.text:
            draft.warn(
                f"{setting.label} is used as {target}={setting.value}: {row.effect.text}", setting
            )


def _put_plain(draft: ArgumentDraft) -> None:
    """Set options that become their argument unchanged, passed-through ones included."""
    for setting, row in mapped_rows(draft):
        if row is None or not (row.effect.is_computed or row.effect.is_fallback):
            draft.put(setting.targets[0], setting.value, setting.origin)


def _put_defaults(draft: ArgumentDraft) -> None:
    """Set the arguments that LMI always passes."""
    for setting in draft.settings.model.details.values():
        row = draft.options.find(setting.name)
        if setting.is_set or row is None or setting.effect != EffectWord.MAPS_TO:
            continue
        if not (row.effect.is_computed or row.effect.is_fallback):
            draft.put_if_unset(setting.targets[0], setting.value, DEFAULT_ORIGIN)
    draft.put_if_unset("revision", None, DEFAULT_ORIGIN)


def _check_checkpoint(draft: ArgumentDraft) -> None:
    """Note what does not go with the checkpoint."""
    shape = read_checkpoint(draft.config)
    draft.errors += [*misstated_quantization(draft.config), *unsupported_quantization(shape)]
    if draft.config:
        draft.errors += checkpoint_errors(shape, draft.values, has_gpus=draft.devices.gpu_count > 0)
    if draft.config and isinstance(draft.values.get("quantization"), str):
        draft.warnings += checkpoint_warnings(shape, draft.values)


class Translator:
    """Translates settings by its rules; `rules` are those of features, for each phase in order."""

    def __init__(
        self,
        options: OptionTable,
        sources: Sources,
        engines: OwnEngines,
        rules: Mapping[RulePhase, Sequence[Rule]],
    ) -> None:
        self._options = options
        self._sources = sources
        self.engines = engines
        added = {phase: tuple(rules.get(phase, ())) for phase in RulePhase}
        self._before_checkpoint: tuple[Rule, ...] = (
            _put_model, _put_plain, *_RULES, *added[RulePhase.WRITTEN], _put_fallbacks,
            _put_defaults, *added[RulePhase.DEFAULTS], offer_sizes,
            assign_devices, put_sleep, put_cpu_cache, *added[RulePhase.PLACED],
        )  # fmt: skip
        self._of_checkpoint = (
            *added[RulePhase.CHECKPOINT], refuse_size, named_files, named_adapters, named_models,
            *CHECKPOINT_RULES,
            _check_checkpoint, compile_if_possible,
        )  # fmt: skip

    def translate_start(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        devices: Devices,
        read: ModelReader = read_local_files,
        unnamed: ModelFiles | None = None,
    ) -> Translation:
        """The translation for the configured model, with all errors of both.

        `read` returns the model's config.json, so that arguments which it excludes are errors
        before the weights are fetched. A missing model is no error of the configuration; it is only
        in `missing`, and `unnamed` is then what is known of the files.
        """
        model, missing = None, None
        try:
            model = locate_model(settings, environ)
        except ModelSourceError as error:
            missing = error
        files = (unnamed or ModelFiles()) if model is None else read(model)
        known = {**environ, **settings.environment_exports}
        translation = self.translate(settings, model, devices, files, known)
        is_fault = missing is not None and not isinstance(missing, NoModelError)
        is_unread = bool(files.problem) and model is not None and not is_directory(model.model)
        said = (*settings.errors, *translation.errors, *translation.warnings)
        is_new = is_unread and not any(files.problem in sentence for sentence in said)
        unread = (files.unread_warning,) if is_new and not files.is_missing else ()
        absent = (_absent(files, settings),) if is_new and files.is_missing else ()
        warnings = (*translation.warnings, *unread, *_archive_warnings(model))
        return replace(
            translation,
            warnings=(*settings.warnings, *warnings),
            errors=(
                *settings.errors,
                *absent,
                *([str(missing)] if is_fault else []),
                *translation.errors,
            ),
            missing=missing,
            files=files,
        )

    def translate(
        self,
        settings: Settings,
        model: ModelArtifacts | None,
        devices: Devices,
        files: ModelFiles | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Translation:
        """The translation for a known model; raises nothing.

        Without `files` those of a local model count, without `environ` no variable is missing.
        Errors in `settings.errors` are not repeated.
        """
        if files is None:
            files = ModelFiles() if model is None else read_local_files(model)
        draft = self._draft(settings, model, devices, files)
        draft.environ = environ
        for rule in self._before_checkpoint:
            rule(draft)
        return self._with_checkpoint_rules(draft)

    def translate_checkpoint(
        self,
        settings: Settings,
        model: ModelArtifacts,
        devices: Devices,
        arguments: EngineArguments,
    ) -> Translation:
        """The translation of a model that was just fetched: the rules of its config.json again."""
        draft = self._draft(settings, model, devices, read_local_files(model))
        draft.values |= arguments.values
        draft.origins |= arguments.origins
        return self._with_checkpoint_rules(draft)

    def _draft(
        self,
        settings: Settings,
        model: ModelArtifacts | None,
        devices: Devices,
        files: ModelFiles,
    ) -> ArgumentDraft:
        known = (self._options, self._sources, self.engines)
        return ArgumentDraft(settings, model, devices, *known, config=files.config or {})

    def _with_checkpoint_rules(self, draft: ArgumentDraft) -> Translation:
        """The translation of `draft`, after the rules that read the model's config.json."""
        for rule in self._of_checkpoint:
            rule(draft)
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
