"""Grammars are tried in a process that can end, before the engine sees them."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    grammar_trials=Lazy("lmi_vllm.extras.grammar_trials.guard:GrammarGuard"),
    engine_grammars=Lazy("lmi_vllm.extras.grammar_trials.engine:GrammarWatch"),
)
