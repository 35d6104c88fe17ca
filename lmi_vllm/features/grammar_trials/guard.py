"""Grammars that would stall the engine are refused before it compiles them.

vLLM compiles a schema, regular expression or grammar in a thread of its engine that cannot be
stopped. Then it uses the grammar for each token inside the engine's step. A request of a few bytes
can make both take minutes. So a child process does both first, and only fast grammars reach the
engine. vLLM also checks each on the event loop, at every request. That is done once here, and what
is slow there is refused. A trial cannot reach every state (behind a rare word that `logit_bias`
forces, for example), so the scheduler ends a request whose grammar becomes slow (engine.py).

Upstream: https://github.com/vllm-project/vllm/issues/54003.
Releases: 0.31 and later, with xgrammar 0.2.8.
Shows: `minProperties` over 200 optional ones compiles for 15 s. `((a{1,100}){1,100}){1,100}` takes
    over a second a token after 90, and all others wait. A schema of 700 bounded integers blocks the
    event loop for 0.2 s each time.
May go: when tests/contract/test_hostile_grammars.py holds without it.
"""

import asyncio
import contextlib
import hashlib
import importlib
import re
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from lmi_vllm.engine.vllm.names import SamplingParams, StructuredOutputsParams, VLLMValidationError
from lmi_vllm.features.grammar_trials.contradictions import check_contradictions
from lmi_vllm.features.grammar_trials.ignored import nothing_left_out
from lmi_vllm.features.grammar_trials.trials import Trials
from lmi_vllm.features.grammar_trials.walks import TriedGrammar

# Processor time that vLLM's check may take, which is made once on the event loop.
CHECK_SECONDS: Final = 0.3
MAX_CHECKED: Final = 1024  # constraints whose check is not made again
_BACKENDS: Final = {
    "xgrammar": XgrammarBackend,
    "guidance": GuidanceBackend,
    "outlines": OutlinesBackend,
    "lm-format-enforcer": LMFormatEnforcerBackend,
}
_IMPORTED: Final = ("llguidance.hf", "llguidance.torch", "lmformatenforcer", "outlines_core")
_PLACE: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # in xgrammar's code
_AUTO: Final = "auto"  # the first of them, and others for what it lacks


class GrammarGuard:
    """Has every constraint of an engine tried before the engine gets it; see `CheckGrammar`."""

    def __init__(self, llm: Any, seconds: float, thread: ThreadPoolExecutor) -> None:
        self._llm = llm
        self._trials = Trials(seconds, thread)
        self._vocabulary: _Vocabulary | None = None  # once one is needed
        self._reading = asyncio.Lock()
        self._checked: OrderedDict[bytes, dict[str, Any]] = OrderedDict()
        llm.input_processor.structured_outputs_config = None  # its check is made here, once

    async def __call__(
        self, outputs: StructuredOutputsParams, max_tokens: int | None, source: str
    ) -> None:
        """Check that the engine may compile this constraint for an answer of so many tokens.

        Raises:
            VLLMValidationError: it takes too long or too much memory, or is no grammar at all.
        """
        async with self._reading:
            if self._vocabulary is None:
                self._vocabulary = await asyncio.to_thread(_Vocabulary, self._llm)
        compile_grammar = partial(self._vocabulary.compiled, outputs)
        verdict = await self._trials.verdict(_named(outputs), compile_grammar, max_tokens, source)
        if verdict:
            raise VLLMValidationError(verdict)
        self._check(outputs)

    def _check(self, outputs: StructuredOutputsParams) -> None:
        """Make vLLM's check, which chooses the library and may write a grammar for a constraint.

        Of a constraint that had it before only the results are taken.

        Raises:
            ValueError: vLLM refuses it.
        """
        digest = hashlib.sha256(repr(outputs).encode("utf-8", "replace")).digest()
        changes = self._checked.get(digest)
        if changes is None:
            before = dict(vars(outputs))
            config, tokenizer = self._llm.vllm_config, self._llm.renderer.tokenizer
            params = SamplingParams(structured_outputs=outputs)
            params.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
            changes = {
                name: value
                for name, value in vars(outputs).items()
                if value is not before.get(name, self)
            }
            self._checked[digest] = changes
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        vars(outputs).update(changes)


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
            ValueError: vLLM refuses it, takes too long to see whether it does, its library
                leaves out a part of it, or nothing matches it.
        """
        config = self._config
        params, began = SamplingParams(structured_outputs=outputs), time.process_time()
        with _explained(outputs):
            params.verify(
                config.model_config, None, config.structured_outputs_config, self._tokenizer
            )
        if (seconds := time.process_time() - began) > CHECK_SECONDS:
            raise ValueError(f"it is too large: the check of it takes {seconds:.2g} s and more")
        outputs = params.structured_outputs
        check_contradictions(outputs)
        name = str(outputs._backend)
        backend = self._backends.get(name) or self._new_backend(name)  # in a child: for it alone
        with nothing_left_out():
            grammar = backend.compile_grammar(*get_structured_output_key(outputs))
        bitmask = torch.full((1, (self._size + 31) // 32), -1, dtype=torch.int32)
        return TriedGrammar(grammar, bitmask, self._lengths, self._ends)


@contextlib.contextmanager
def _explained(outputs: StructuredOutputsParams) -> Iterator[None]:
    """Say why xgrammar refuses a structural tag, such as that of a forced tool call.

    vLLM asks guidance then, which only takes an older form, and says "'triggers'".
    """
    try:
        yield
    except (ValueError, VLLMValidationError) as error:
        if outputs.structural_tag is None:
            raise
        first: BaseException = error
        while (before := first.__cause__ or first.__context__) is not None:
            first = before
        missing = f"the structural tag lacks {first}"
        text = missing if isinstance(first, KeyError) else _PLACE.sub("", str(first))
        raise ValueError(text.strip()) from None


def _named(outputs: StructuredOutputsParams) -> str:
    try:
        kind, text = get_structured_output_key(outputs)
    except RecursionError:
        raise VLLMValidationError("the JSON schema is nested too deeply") from None
    return f"{kind} {text}"
