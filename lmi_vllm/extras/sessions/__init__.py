"""Sticky sessions: a client's directory, created, named by its requests and closed."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.sessions.sessions:SessionSettings"),),
    late_rules=(Lazy("lmi_vllm.extras.sessions.start:check_store"),),
    lifespan=Lazy("lmi_vllm.extras.sessions.start:keeping_sessions"),
)
