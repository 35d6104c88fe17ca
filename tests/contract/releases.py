"""For which releases of vLLM a test holds; on the one that `make setup` installs each runs."""

import pytest

from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.workarounds import is_affected


def before(release: str, why: str) -> pytest.MarkDecorator:
    """Mark what holds before this release."""
    text = f"for vLLM before {release}: {why}"
    return pytest.mark.skipif(not is_affected("vllm", release), reason=text)


def since(release: str, why: str) -> pytest.MarkDecorator:
    """Mark what holds from this release on."""
    text = f"for vLLM {release} and later: {why}"
    return pytest.mark.skipif(is_affected("vllm", release), reason=text)


def needs(name: str) -> pytest.MarkDecorator:
    """Mark what asks for one of vLLM's names (`package.module:Class.name`)."""
    return pytest.mark.skipif(not workarounds.has_name(name), reason=f"this vLLM has no {name}")
