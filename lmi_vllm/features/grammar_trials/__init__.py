"""Grammars are tried in a process that can end, before the engine sees them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from lmi_vllm.engine.base import CheckGrammar, EngineGrammars
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    s.engines.vllm.grammar_trials.fill(try_grammars)


def try_grammars(llm: object, seconds: float, thread: "ThreadPoolExecutor") -> "CheckGrammar":
    """Return what tries a grammar before the engine gets it."""
    from lmi_vllm.features.grammar_trials.guard import GrammarGuard

    return GrammarGuard(llm, seconds, thread)


def watch_grammars(scheduler: object) -> "EngineGrammars":
    """Return what watches the grammars in the engine's process."""
    from lmi_vllm.features.grammar_trials.engine import GrammarWatch

    return GrammarWatch(scheduler)
