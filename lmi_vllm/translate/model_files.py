"""Arguments that follow from the files in the model's folder: its tokenizer and its length."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lmi_vllm.checks.model import text_part
from lmi_vllm.checks.model_config import read_directory, tensor_names
from lmi_vllm.checks.model_length import (
    ALLOW_LONG,
    is_allowed_longer,
    longest_sequence,
    overridden,
)
from lmi_vllm.checks.weight_files import weight_problems
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.vllm_schema import load_release
from lmi_vllm.messages import Origin, OriginKind
from lmi_vllm.sources.local import is_directory, is_file
from lmi_vllm.translate.draft import ArgumentDraft, Rule

# Tokenizers that Transformers reads, and those that only mistral_common does.
_TRANSFORMERS: Final = ("tokenizer.json", "tokenizer.model")
_CONFIGS: Final = ("config.json", "params.json")
_NOMIC_LENGTH: Final = 2048  # vLLM's, where config.json says none (models/config.py)
# Their rules are in `length`; vLLM reads these files, not config.json, for the length.
_OF_OWN_LENGTH: Final = ("nomic_bert",)
_OTHER_LENGTHS: Final = ("params.json", "sentence_*_config.json")
_MISTRAL: Final = ("tekken.json", "tokenizer.model.v*")
# Parts of the names of weights that turn a state into scores.
_HEADS: Final = frozenset(
    ("classification_head", "classifier", "regression_head", "reward_head", "score", "v_head")
)
# In config.json: the scores are those of words (Qwen3-Reranker), so the head is the model's own.
_HEAD_FROM_TOKENS: Final = ("classifier_from_token", "is_original_qwen3_reranker")
_READ: Final = frozenset((".safetensors", ".bin", ".pt"))
# Names of the files of a tokenizer, of Transformers' older and slow ones, too.
_OF_TOKENIZER: Final = re.compile(r"token|vocab|merges|piece|tekken|\.model\b|\.py$", re.IGNORECASE)


def readable(draft: ArgumentDraft) -> None:
    """Refuse a folder that is no model before vLLM is imported, which takes half a minute."""
    folder, values = draft.values.get("model"), draft.values
    if not isinstance(folder, str) or not is_directory(folder) or values.get("hf_config_path"):
        return
    path = Path(folder)
    if (path / "config.json").is_file():
        if problem := read_directory(path).problem:
            draft.fail(f"{draft.label('model')}: {folder}: {problem}")
        return
    directory = draft.model.directory if draft.model is not None else None
    # Code of a user may serve what no engine reads; GGUF alone has an error of its own.
    if any((place / "model.py").is_file() for place in (path, directory) if place is not None):
        return
    if (path / "params.json").is_file() or any(path.glob("*.gguf")):
        return
    inner = sorted(found.parent.name for name in _CONFIGS for found in path.glob(f"*/{name}"))
    advice = f"; its folder {inner[0]} has one: name {path / inner[0]}" if inner else ""
    draft.fail(f"{draft.label('model')}: {folder} is no model: it has no config.json{advice}")


def mistral_tokenizer(folder: Path) -> str:
    """The file of the only tokenizer in `folder` if it is Mistral's own; else empty."""
    if any((folder / name).is_file() for name in _TRANSFORMERS):
        return ""
    return next((found.name for kind in _MISTRAL for found in sorted(folder.glob(kind))), "")


def mode_of(values: Mapping[str, object]) -> Mapping[str, Origin]:
    """The tokenizer_mode that these arguments lack, and why; empty where they need none.

    vLLM reads Mistral's own tokenizer as its makers do only where the weights have Mistral's
    layout, too. Otherwise Transformers makes a tokenizer of the file, without a chat template, and
    without BOS before a prompt.
    """
    folder = values.get("tokenizer") or values.get("model")
    if values.get("tokenizer_mode") not in (None, "auto") or not isinstance(folder, str):
        return {}
    file = mistral_tokenizer(Path(folder)) if is_directory(folder) else ""
    return {"mistral": Origin(OriginKind.DERIVED, f"{folder}/{file}")} if file else {}


def tokenizer_mode(draft: ArgumentDraft) -> None:
    """Put the mode of a tokenizer of Mistral's own."""
    for mode, origin in mode_of(draft.values).items():
        draft.put("tokenizer_mode", mode, origin)


def length(draft: ArgumentDraft) -> None:
    """Say where the engine serves less than config.json promises, or computes wrong vectors."""
    body = text_part(draft.config)
    rope = body.get("rope_scaling") or body.get("rope_parameters")
    longest, asked = body.get("max_position_embeddings"), draft.values.get("max_model_len")
    if body.get("model_type") == "nomic_bert":
        _refuse_short(draft, body)
    elif isinstance(rope, dict) and isinstance(longest, int):
        kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
        is_auto = not isinstance(asked, int) or asked < 0
        if kind in ("longrope", "su") and is_auto:
            _warn_of_longrope(draft, body.get("original_max_position_embeddings"), longest)
        elif kind == "dynamic" and isinstance(factor, int | float) and factor > 1:
            promised = int(longest * factor) if is_auto else asked
            if isinstance(promised, int) and promised > longest:
                draft.warn(
                    f"max_model_len is {longest} and not {promised}: config.json scales the rotary "
                    f"embedding dynamically, and vLLM has no values for later positions",
                    draft.settings.model.details.max_model_len,
                )


def own_length(draft: ArgumentDraft) -> None:
    """Refuse a length above the model's before vLLM is imported, unless its variable allows one."""
    asked, folder = draft.values.get("max_model_len"), draft.values.get("model")
    if draft.environ is None or not isinstance(asked, int) or _has_other_length(draft, folder):
        return
    longest = longest_sequence(overridden(draft.config, draft.values.get("hf_overrides")))
    if longest is not None and asked > longest:
        say = draft.warn if is_allowed_longer(draft.environ) else draft.fail
        say(
            f"{draft.label('max_model_len')}: {asked} is above {longest}, the model's own length "
            f"(config.json); {ALLOW_LONG}=1 or rope scaling in hf_overrides would be needed",
            draft.settings.model.details.max_model_len,
        )


def _has_other_length(draft: ArgumentDraft, folder: object) -> bool:
    """Whether something else than config.json says how long this model's sequences may be."""
    if draft.config.get("model_type") in _OF_OWN_LENGTH:
        return True
    if draft.values.get("hf_config_path") or draft.values.get("config_format") == "mistral":
        return True
    if draft.engines.of(draft.architectures, draft.values) is not None:
        return True
    if not isinstance(folder, str) or not is_directory(folder):
        return False
    return any(found for name in _OTHER_LENGTHS for found in Path(folder).glob(name))


def _warn_of_longrope(draft: ArgumentDraft, served: object, longest: int) -> None:
    if isinstance(served, int) and served < longest:
        draft.warn(
            f"max_model_len is {served}, though the model takes {longest} (config.json): with "
            f"longrope vLLM serves the length before scaling unless option.max_model_len is set. "
            f"A larger one, up to {longest}, uses the factors for long texts in every request, "
            f"which costs some quality in short ones",
            draft.settings.model.details.max_model_len,
        )


def _refuse_short(draft: ArgumentDraft, body: Mapping[str, object]) -> None:
    """Below the trained length vLLM's dynamic scaling makes wrong vectors, or none."""
    known = (body.get(name) for name in ("max_trained_positions", "max_position_embeddings"))
    trained = next((number for number in known if isinstance(number, int)), _NOMIC_LENGTH)
    asked = draft.values.get("max_model_len")
    if isinstance(asked, int) and 0 < asked < trained:
        draft.fail(
            f"{draft.label('max_model_len')}: {asked} is below {trained}, the length that the "
            f"model was trained with: vLLM scales its rotary embedding wrongly there. Leave it "
            f"out, or set {trained} or more; truncate_prompt_tokens cuts texts",
            draft.settings.model.details.max_model_len,
        )


def head(draft: ArgumentDraft) -> None:
    """Refuse to classify or rank without a head: vLLM would score with random numbers."""
    folder = draft.values.get("model")
    if draft.values.get("convert") != "classify" or not isinstance(folder, str):
        return
    overrides = draft.values.get("hf_overrides")
    stated = {**text_part(draft.config), **(overrides if isinstance(overrides, Mapping) else {})}
    is_named = any("Classification" in name or "Reward" in name for name in draft.architectures)
    if is_named or not is_directory(folder) or any(stated.get(name) for name in _HEAD_FROM_TOKENS):
        return
    names = tensor_names(Path(folder))
    if names and not any(_HEADS.intersection(name.split(".")) for name in names):
        draft.fail(
            f"{draft.label('convert')}: the model has no head that classifies or ranks, so its "
            f"scores would be random: no weight is named {', '.join(sorted(_HEADS))}. Name a "
            f"classifier or a cross-encoder; for vectors use option.task=text-embedding"
        )


def weights(draft: ArgumentDraft) -> None:
    """Refuse a model in GGUF alone before vLLM looks for its weights."""
    release, model = load_release(), draft.values.get("model")
    if "gguf" in release.quantization_methods or not isinstance(model, str):
        return
    path = Path(model)
    files = [path] if is_file(path) else [*path.iterdir()] if is_directory(path) else []
    endings = {file.suffix for file in files}
    if ".gguf" in endings and not endings.intersection(_READ):
        draft.fail(
            f"{draft.label('model')}: {mask_urls(model)} has weights in GGUF only, which vLLM "
            f"{release.release} does not read; use the model's safetensors (where memory is short "
            f"with option.quantize=fp8), or a checkpoint quantized with awq or gptq"
        )


def whole_files(draft: ArgumentDraft) -> None:
    """Refuse files of weights that no engine can load, by their names."""
    folder = draft.values.get("model")
    is_read = draft.values.get("load_format") != "dummy" and "model_weights" not in draft.values
    if is_read and isinstance(folder, str) and is_directory(folder):
        for problem in weight_problems(Path(folder)):
            draft.fail(f"the model's weights: {problem}")


def tokenizer(draft: ArgumentDraft) -> None:
    """Refuse a whole model without any tokenizer before vLLM is imported.

    A folder without weights is no whole model: they may be streamed, or the engine makes them up.
    """
    values, folder = draft.values, draft.values.get("model")
    is_told = values.get("tokenizer") or values.get("skip_tokenizer_init")
    if is_told or not isinstance(folder, str) or not is_directory(folder):
        return
    files = [*Path(folder).iterdir()]
    has_weights = any(file.suffix in _READ for file in files)
    if has_weights and not any(_OF_TOKENIZER.search(file.name) for file in files):
        draft.fail(
            f"the model's tokenizer: {folder} has no file of one (tokenizer.json, tokenizer.model, "
            f"vocab.txt, ...); fetch the model again, or name a folder in option.tokenizer"
        )


CHECKPOINT_RULES: Final[tuple[Rule, ...]] = (
    readable, tokenizer_mode, length, own_length, head, weights, whole_files, tokenizer
)  # fmt: skip
