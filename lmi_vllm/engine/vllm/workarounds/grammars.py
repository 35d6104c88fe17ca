"""Grammars that would stall the engine, or that it compiles with another request's library.

vLLM compiles a schema, regular expression or grammar in a thread of its engine that cannot be
stopped. Then it uses the grammar for each token inside the engine's step. A request of a few bytes
can make both take minutes. So a child process of the extra grammar_trials does both first, and only
fast grammars reach the engine. vLLM also checks each on the event loop, so what is slow there is
refused. A trial cannot reach every state (behind a rare word that `logit_bias` forces, for
example), so the scheduler ends a request whose grammar becomes slow (`hostile_requests`).

vLLM chooses one of four libraries for each, but compiles with that of the engine's first request.
After a schema that only Outlines takes, no other request could have an object or a grammar. With
xgrammar first, what only another library knows was ignored. Here the engine keeps a library for
each.

Upstream: https://github.com/vllm-project/vllm/issues/54003 (stalls); the libraries are not reported
    that we know of.
Releases: 0.31 and later, with xgrammar 0.2.8.
Shows: `minProperties` over 200 optional ones compiles for 15 s. `((a{1,100}){1,100}){1,100}` takes
    over a second a token after 90, and all others wait. After `patternProperties` beside
    `multipleOf` every `json_object` is 500.
May go: when tests/contract/test_hostile_grammars.py holds without it.
"""

import asyncio
import copy
import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self

import numpy as np
import torch
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from lmi_vllm.engine.base import GrammarTrials, TriedGrammar
from lmi_vllm.engine.vllm.names import SamplingParams, StructuredOutputsParams, VLLMValidationError
from lmi_vllm.extension import extension

_UNTRIED: Final = (
    "a schema, regular expression or grammar needs the extra grammar_trials, which is not "
    "installed; LMI_GRAMMAR_TIMEOUT=0 serves it untried"
)
# Processor time that vLLM's check may take, which it makes again on the event loop.
CHECK_SECONDS: Final = 0.3
_BACKENDS: Final = {
    "xgrammar": XgrammarBackend,
    "guidance": GuidanceBackend,
    "outlines": OutlinesBackend,
    "lm-format-enforcer": LMFormatEnforcerBackend,
}
_IMPORTED: Final = ("llguidance.hf", "llguidance.torch", "lmformatenforcer", "outlines_core")
_AUTO: Final = "auto"  # the first of them, and others for what it lacks


@dataclass(slots=True)
class GrammarGuard:
    """Has every constraint tried before the engine gets it; refuses it if nothing tries it."""

    llm: Any
    trials: GrammarTrials | None
    _vocabulary: "_Vocabulary | None" = None  # once one is needed
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, llm: Any, seconds: float, thread: ThreadPoolExecutor) -> Self:
        """Return the guard with an extra's trials; `thread` is the parent of their processes."""
        make = extension(lambda extra: extra.grammar_trials)
        return cls(llm, None if make is None else make(seconds, thread))

    async def check(
        self, outputs: StructuredOutputsParams, max_tokens: int | None, source: str
    ) -> None:
        """Check that the engine may compile this constraint for an answer of so many tokens.

        Raises:
            VLLMValidationError: it takes too long or too much memory, or is no grammar at all.
        """
        if self.trials is None:
            raise VLLMValidationError(_UNTRIED)
        async with self._reading:
            if self._vocabulary is None:
                self._vocabulary = await asyncio.to_thread(_Vocabulary, self.llm)
        compile_grammar = partial(self._vocabulary.compiled, outputs)
        verdict = await self.trials.verdict(_named(outputs), compile_grammar, max_tokens, source)
        if verdict:
            raise VLLMValidationError(verdict)


class _Vocabulary:
    """The vocabulary as the libraries need it: read once, children share it."""

    def __init__(self, llm: Any) -> None:
        self._config, self._tokenizer = llm.vllm_config, llm.renderer.tokenizer
        self._size = int(self._config.model_config.get_vocab_size())
        self._ends = np.array([self._tokenizer.eos_token_id or 0])
        self._lengths = np.zeros(self._size, dtype=np.int32)
        for token, number in self._tokenizer.get_vocab().items():
            if number < self._size:
                self._lengths[number] = len(token)
        chosen = self._config.structured_outputs_config.backend
        usual = next(iter(_BACKENDS)) if chosen == _AUTO else chosen
        self._backends = {usual: self._new_backend(usual)}
        for library in _IMPORTED:  # by vLLM when it first uses one: on the event loop
            importlib.import_module(library)

    def _new_backend(self, name: str) -> Any:
        return _BACKENDS[name](self._config, tokenizer=self._tokenizer, vocab_size=self._size)

    def compiled(self, outputs: StructuredOutputsParams) -> TriedGrammar:
        """Return the grammar, compiled by the library that vLLM chooses for it.

        Raises:
            ValueError: vLLM refuses it, or takes too long to see whether it does.
        """
        config = self._config
        params, began = SamplingParams(structured_outputs=outputs), time.process_time()
        params.verify(config.model_config, None, config.structured_outputs_config, self._tokenizer)
        if (seconds := time.process_time() - began) > CHECK_SECONDS:
            raise ValueError(f"it is too large: the check of it takes {seconds:.2g} s and more")
        outputs = params.structured_outputs
        name = str(outputs._backend)
        backend = self._backends.get(name) or self._new_backend(name)  # in a child: for it alone
        grammar = backend.compile_grammar(*get_structured_output_key(outputs))
        bitmask = torch.full((1, (self._size + 31) // 32), -1, dtype=torch.int32)
        return TriedGrammar(grammar, bitmask, self._lengths, self._ends)


def _named(outputs: StructuredOutputsParams) -> str:
    try:
        kind, text = get_structured_output_key(outputs)
    except RecursionError:
        raise VLLMValidationError("the JSON schema is nested too deeply") from None
    return f"{kind} {text}"


class EveryBackend(StructuredOutputManager):  # type: ignore[misc,unused-ignore]
    """vLLM's manager of grammars with a library for each kind of request, not the first for all."""

    backend: Any
    backends: dict[str, Any]

    def grammar_init(self, request: Any) -> None:
        """As vLLM's, with the request's own library, also for the thread that compiles it."""
        if request.structured_output_request is None:
            return
        outputs = request.structured_output_request.params
        ours: Any = copy.copy(self)
        ours.backend = self.backends.get(outputs._backend)
        StructuredOutputManager.grammar_init(ours, request)  # makes one where there is none
        self.backend = self.backends[outputs._backend] = ours.backend


def keep_every_backend(manager: Any) -> None:
    """Make an engine's manager, which has had no request yet, one that keeps every library."""
    manager.backends = {}
    manager.__class__ = EveryBackend
