"""Files that options name: relative paths count from the model's folder, as in LMI."""

from pathlib import Path
from typing import Final

from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.sources.local import file_url_path, looks_like_path
from lmi_vllm.translate.draft import ArgumentDraft

_OPTIONS: Final = ("chat_template", "tool_parser_plugin", "reasoning_parser_plugin")
# Of these files a folder has one at least (Transformers, mistral_common, vLLM).
_TOKENIZERS: Final = (
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "tekken.json", "config.json",
)  # fmt: skip
_MODELS: Final = ("config.json", "params.json")
_INLINE: Final = frozenset("{}\n")  # in a template that is no path; vLLM's own rule


def located(text: str | None, model: ModelArtifacts | None) -> str | None:
    """The path of a file in the model's folder; any other text as it is."""
    if text is None or model is None or model.directory is None or _INLINE & {*text}:
        return text
    path = model.directory / text
    return str(path.absolute()) if is_file(path) else text


def is_file(path: Path) -> bool:
    """Whether there is such a file; a text that no path can be is none."""
    try:
        return path.is_file()
    except OSError:  # a name that is too long; later Pythons than 3.13 say False
        return False


def named_files(draft: ArgumentDraft) -> None:
    """Refuse a file that does not exist; one of the model's folder gets its whole path."""
    model = draft.model
    if model is None or (model.directory is None and draft.sources.is_store(model.reference)):
        return  # not known yet
    for name in _OPTIONS:
        setting = getattr(draft.settings.model.details, name)
        text = setting.value
        if not setting.is_set or not isinstance(text, str) or _INLINE & {*text}:
            continue
        path = str(located(text, model))
        if not is_file(Path(path)):
            place = f"neither in {model.directory} nor in" if model.directory else "not in"
            also = "" if Path(text).is_absolute() else f": it is {place} the working directory"
            draft.fail(f"{setting.stated} names a file that does not exist{also}", setting)
        elif name in draft.values:
            draft.put(name, path, setting.origin)


def named_adapters(draft: ArgumentDraft) -> None:
    """Refuse an adapter of the start whose path does not exist: the engine would start first."""
    setting = draft.settings.model.details.lora_modules
    named = draft.settings.model.lora_modules if draft.model is not None else None
    for name, source in (named or {}).items():
        if not looks_like_path(source):
            continue
        try:
            path = file_url_path(source) or Path(source)
        except ValueError as error:
            draft.fail(f"{setting.label}: adapter {name}: {error}", setting)
            continue
        if not Path(path).expanduser().exists():
            draft.fail(f"{setting.label}: adapter {name}: {source} does not exist", setting)


def named_models(draft: ArgumentDraft) -> None:
    """Refuse a tokenizer or a draft model that is not there: vLLM says so after its import."""
    drafted = draft.values.get("speculative_config")
    places = [
        ("tokenizer", draft.values.get("tokenizer"), _TOKENIZERS),
        ("speculative_config", isinstance(drafted, dict) and drafted.get("model"), _MODELS),
    ]
    for argument, place, files in places:
        if draft.model is None or not isinstance(place, str) or not looks_like_path(place):
            continue
        folder = Path(place).expanduser()
        if not folder.exists():
            draft.fail(f"{draft.label(argument)}: {place} does not exist")
        elif folder.is_dir() and not any(is_file(folder / name) for name in files):
            draft.fail(f"{draft.label(argument)}: {place} has none of {', '.join(files)}")
