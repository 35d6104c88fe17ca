"""Speculative decoding: LMI's names and vLLM's older ones, and the draft model that is fetched."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.speculation.rules import (
        SpeculationSettings,
        check_draft_degree,
    )
    from lmi_vllm.features.speculation.rules import (
        configure as put_drafts,
    )
    from lmi_vllm.translate.draft import RulePhase

    c.settings.append(SpeculationSettings)
    c.rules[RulePhase.WRITTEN].append(put_drafts)
    c.rules[RulePhase.PLACED].append(check_draft_degree)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.speculation.rules import fetch_draft

    s.start.downloads.append(fetch_draft)
