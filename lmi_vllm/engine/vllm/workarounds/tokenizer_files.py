"""Tokenizers whose class splits text in another way than their own tokenizer.json.

Transformers 5 takes the vocabulary out of tokenizer.json. All else is made by the class that
tokenizer_config.json names. Where that class is not the one the file was made with, ids and texts
are wrong: DeepSeek's byte-level tokenizers name `LlamaTokenizerFast`, and lose every blank.
SmolLM2's and StarCoder2's name `GPT2Tokenizer`, and no longer take numbers digit by digit. Models
were trained with the file, so the generic class, which takes the file as it is, is used then.

Upstream: https://github.com/huggingface/transformers/issues/45488, 48206; its lists of models that
    need the generic class go by their names on the hub, and our path is local.
Releases: transformers 5.0 and later.
Shows: prompts without blanks, answers with `Ġ` and `Ċ`, status 200 and no warning.
May go: when test_plain_transformers_splits_text_by_the_class fails.
"""

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

FILE: Final = "tokenizer.json"
GENERIC: Final = "TokenizersBackend"
# Texts that tokenizers split apart where they split text differently. None begins with a blank:
# whether one is put before the first word is the class's to say.
PROBES: Final = (
    "The quick brown fox's 12345 jumps, over 3.14 lazy dogs!",
    "def f(n):\n    if n < 2:\n\n\t\treturn n  # naïve Größe 2024",
    "日本語のテキスト и русский текст 🙂",
)
# Of a pre-tokenizer, what does not say where text is split; classes set it from other files.
_PLACES: Final = frozenset(("add_prefix_space", "trim_offsets", "prepend_scheme"))
_FOR_AUTO: Final = ("config", "use_fast", "tokenizer_type", "trust_remote_code", "mistral_format")
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def as_in_their_files(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for `AutoTokenizer.from_pretrained`."""

    @functools.wraps(load)
    def from_pretrained(path: Any, *inputs: Any, **options: Any) -> Any:
        tokenizer = load(path, *inputs, **options)
        file = Path(path) / FILE
        if not (_is_made_by_class(tokenizer) and file.is_file()):
            return tokenizer
        if _splits_like(tokenizer, json.loads(file.read_bytes())) or _has_ids_of(tokenizer, file):
            return tokenizer
        logger.warning(
            "the tokenizer in %s is used as tokenizer.json has it: its class, %s, splits text "
            "in another way than the file",
            path,
            type(tokenizer).__name__,
        )
        kept = {name: value for name, value in options.items() if name not in _FOR_AUTO}
        return _as_it_is(tokenizer, path, *inputs, **kept)

    return from_pretrained


def _is_made_by_class(tokenizer: Any) -> bool:
    """Whether a class of Transformers' own makes all but the vocabulary."""
    kind = type(tokenizer)
    is_generic = kind.__name__ == GENERIC or "__init__" not in vars(kind)
    is_theirs = kind.__module__.startswith("transformers.models.")
    return is_theirs and not is_generic and hasattr(tokenizer, "backend_tokenizer")


def _splits_like(tokenizer: Any, file: Mapping[str, Any]) -> bool:
    """Whether text is split and joined by the rules of the file.

    Only byte-level rules are compared: those of SentencePiece are written in several ways that mean
    the same, and its classes are right.
    """
    made = tokenizer.backend_tokenizer
    read = (file.get("pre_tokenizer"), file.get("decoder"))
    used = (_state(made.pre_tokenizer), _state(made.decoder))
    of_bytes = [["ByteLevel" in json.dumps(part) for part in side] for side in (read, used)]
    if not any(map(any, of_bytes)):
        return True
    return of_bytes[0] == of_bytes[1] and list(_rules(read[0])) == list(_rules(used[0]))


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _rules(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rules of a pre-tokenizer, those of a sequence one by one."""
    if not part:
        return
    if part["type"] == "Sequence":
        for one in part["pretokenizers"]:
            yield from _rules(one)
    else:
        yield {name: value for name, value in part.items() if name not in _PLACES}


def _has_ids_of(tokenizer: Any, file: Path) -> bool:
    """Whether the probes have the ids of the file, and become the same texts again."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    read, made = Tokenizer.from_file(str(file)), tokenizer.backend_tokenizer
    try:
        for text in PROBES:
            ids = read.encode(text, add_special_tokens=False).ids
            if made.encode(text, add_special_tokens=False).ids != ids:
                return False
            if made.decode(ids).strip() != read.decode(ids).strip():
                return False
    except Exception:  # noqa: BLE001 (the library's own: an unknown token that is not there)
        return False
    return True


def _as_it_is(tokenizer: Any, path: Any, *inputs: Any, **options: Any) -> Any:
    """Return the generic tokenizer of the file, with the special tokens that the class has."""
    kinds: tuple[Any, ...] = type(tokenizer).__mro__
    generic = next(kind for kind in kinds if kind.__name__ == GENERIC)
    found = generic.from_pretrained(path, *inputs, **options)
    known = found.get_vocab()
    for name in _SPECIAL:
        token = getattr(tokenizer, name)
        if getattr(found, name) is None and token in known:
            found.add_special_tokens({name: token})
    return found
