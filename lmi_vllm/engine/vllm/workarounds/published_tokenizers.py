"""Tokenizer code that models are published with, written for Transformers 4.

Transformers 5 calls such code in other ways than it was written for. ChatGLM's `_pad` lacks an
argument that is always passed now. Baichuan's calls the base class before it has a vocabulary, and
the base class asks for it at once. Each class is adapted as it is loaded.

InternLM2's code is not used at all: vLLM makes the generic tokenizer from its SentencePiece file.
That one puts no blank before the first word, whatever the file says, and no BOS before a prompt.

A model may have more ids than its tokenizer, so that their number divides well. Tokenizers in
Python fail on such an id, and vLLM reads the answers of all requests in one task: one id ended the
server. Here it is an empty text, as of a tokenizer in Rust.

Upstream: https://github.com/zai-org/ChatGLM3/issues/1324 and
    https://github.com/huggingface/transformers/issues/27171; the generic class is not reported that
    we know of.
Releases: transformers 5.0 and later.
Shows: the start ends with "_pad() got an unexpected keyword argument" or "'property' object cannot
    be interpreted as an integer". InternLM2 gets other tokens than in its training. `logit_bias`
    for an id behind those of the tokenizer, with `logprobs`, ends the server.
May go: when test_plain_transformers_calls_published_code_in_new_ways,
    test_plain_transformers_leaves_out_the_first_blank and
    test_plain_transformers_fails_on_ids_behind_those_of_the_tokenizer fail.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

SIDE: Final = "padding_side"
WAITING: Final = "lmi_tokens_to_add"  # while the code of a class is still loading its vocabulary
# What code raises for an id that it does not know.
UNKNOWN: Final = (IndexError, KeyError, OverflowError, TypeError, ValueError)
BLANK: Final = "\u2581"  # SentencePiece's
# A class that puts BOS before a prompt unless tokenizer_config.json says otherwise; it seldom does.
BEGINS_PROMPTS: Final = "InternLM2Tokenizer"


def adapted(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for `get_class_from_dynamic_module` where tokenizers are loaded."""

    @functools.wraps(load)
    def loaded(*inputs: Any, **options: Any) -> Any:
        kind = load(*inputs, **options)
        is_python = (
            isinstance(kind, type) and hasattr(kind, "_pad") and hasattr(kind, "_add_tokens")
        )
        if is_python and WAITING not in vars(kind):
            _adapt(kind)
        return kind

    return loaded


def _adapt(kind: Any) -> None:
    kind.lmi_tokens_to_add = None
    if not _takes(kind._pad, SIDE):
        kind._pad = _without_side(kind._pad)
    if "_decode" in vars(kind):  # past `convert_ids_to_tokens`
        kind._decode = _without_unknown(kind._decode)
    if "__init__" in vars(kind):
        kind.__init__ = _vocabulary_first(kind.__init__)
        kind._add_tokens = _once_there_is_a_vocabulary(kind._add_tokens)


def _takes(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)


def _without_side(pad: Callable[..., Any]) -> Callable[..., Any]:
    """Return `pad` for callers that name the side: it pads as the tokenizer is set."""

    @functools.wraps(pad)
    def padded(self: Any, *inputs: Any, padding_side: str | None = None, **options: Any) -> Any:
        return pad(self, *inputs, **options)

    return padded


def _vocabulary_first(init: Callable[..., None]) -> Callable[..., None]:
    """Return `init` that adds what the base class wanted to add once the vocabulary is there."""

    @functools.wraps(init)
    def initialized(self: Any, *inputs: Any, **options: Any) -> None:
        if getattr(self, WAITING) is not None:  # of a class below this one
            init(self, *inputs, **options)
            return
        waiting: list[tuple[Any, bool]] = []
        self.__dict__[WAITING] = waiting
        try:
            init(self, *inputs, **options)
        finally:
            del self.__dict__[WAITING]
        for tokens, special in waiting:
            self._add_tokens(tokens, special_tokens=special)

    return initialized


def _once_there_is_a_vocabulary(add: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(add)
    def added(self: Any, new_tokens: Any, special_tokens: bool = False) -> int:
        waiting = getattr(self, WAITING)
        if waiting is not None:
            try:
                self.get_vocab()
            except (AttributeError, TypeError):  # of what the code sets after the base class
                waiting.append((new_tokens, special_tokens))
                return 0
        return add(self, new_tokens, special_tokens=special_tokens)

    return added


def _without_unknown(decode: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(decode)
    def decoded(self: Any, token_ids: Any, *inputs: Any, **options: Any) -> str:
        try:
            return decode(self, token_ids, *inputs, **options)
        except UNKNOWN:
            ids = [token_ids] if isinstance(token_ids, int) else token_ids
            known = [number for number in ids if self.convert_ids_to_tokens([int(number)]) != [""]]
            return decode(self, known, *inputs, **options) if len(known) < len(ids) else ""

    return decoded


def of_any_id(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for `convert_ids_to_tokens`: an unknown id is an empty token."""

    def token(self: Any, number: int) -> str:
        try:
            return str(convert(self, number) or "")
        except UNKNOWN:
            return ""

    @functools.wraps(convert)
    def converted(self: Any, ids: Any, skip_special_tokens: bool = False) -> Any:
        if isinstance(ids, int):
            return token(self, ids)
        try:
            found: list[str] = convert(self, ids, skip_special_tokens=skip_special_tokens)
            if None not in found:
                return found
        except UNKNOWN:
            pass
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [token(self, int(number)) for number in ids if int(number) not in skipped]

    return converted


def with_its_blank(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for `build_tokenizer_from_spm_proto`, with the blank it asks for."""

    @functools.wraps(build)
    def built(proto: Any, vocab: Any, merges: Any = None) -> Any:
        from tokenizers import decoders, normalizers  # noqa: PLC0415

        made = build(proto=proto, vocab=vocab, merges=merges)
        if made is not None and proto.normalizer_spec.add_dummy_prefix:
            made.normalizer = normalizers.Sequence([made.normalizer, normalizers.Prepend(BLANK)])
            made.decoder = decoders.Sequence([made.decoder, decoders.Strip(" ", 1, 0)])
        return made

    return built


def with_its_bos(convert: Any) -> Any:
    """Return what stands for `_convert_from_sentencepiece`: prompts begin as their class has it."""

    @functools.wraps(convert.__func__)
    def converted(kind: Any, vocab_file: str, stated: dict[str, Any]) -> Any:
        classes = str((stated.get("auto_map") or {}).get("AutoTokenizer"))
        if BEGINS_PROMPTS in classes:
            stated.setdefault("add_bos_token", True)
        return convert.__func__(kind, vocab_file, stated)

    return classmethod(converted)
