"""Rows of the option table that become an engine argument unchanged."""

from lmi_vllm.config.options.row import EffectWord, Option
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.variable_names import find_option
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.origin import DEFAULT_ORIGIN, Origin, OriginKind
from lmi_vllm.translate.draft import ArgumentDraft


def put_model(draft: ArgumentDraft) -> None:
    """The model as the engine gets it."""
    model_id = draft.settings.model.details.model_id
    if draft.model is not None:
        origin = model_id.origin if model_id.is_set else _directory_origin(draft.model)
        draft.put("model", draft.model.model, origin)


def _directory_origin(model: ModelArtifacts) -> Origin:
    """The origin of a model without a model id."""
    if model.directory is None:
        return DEFAULT_ORIGIN
    return Origin(OriginKind.DERIVED, str(model.directory))


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


def put_plain(draft: ArgumentDraft) -> None:
    """Set options that become their argument unchanged, passed-through ones included."""
    for setting, row in mapped_rows(draft):
        if row is None or not (row.effect.is_computed or row.effect.is_fallback):
            draft.put(setting.targets[0], setting.value, setting.origin)


def put_defaults(draft: ArgumentDraft) -> None:
    """Set the arguments that LMI always passes."""
    for setting in draft.settings.model.details.values():
        row = find_option(setting.name)
        if setting.is_set or row is None or setting.effect != EffectWord.MAPS_TO:
            continue
        if not (row.effect.is_computed or row.effect.is_fallback):
            draft.put_if_unset(setting.targets[0], setting.value, DEFAULT_ORIGIN)
    draft.put_if_unset("revision", None, DEFAULT_ORIGIN)
