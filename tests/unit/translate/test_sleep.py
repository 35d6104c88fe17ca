"""LMI_SLEEP_LEVEL and LMI_SLEEP_AFTER_SECONDS: what they need of the engine (docs/sleep.md)."""

from dataclasses import dataclass

import pytest

from lmi_vllm.config.properties import parse_properties
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate


@dataclass(frozen=True)
class Case:
    """Variables, in a word each, and options on `gpus` devices."""

    variables: str
    gpus: int
    given: str = ""
    enables: object = None  # enable_sleep_mode
    fails: str = ""


CASES = (
    Case("", 1),
    Case("LMI_SLEEP_AFTER_SECONDS=60", 0),
    Case("LMI_SLEEP_AFTER_SECONDS=60 LMI_SLEEP_LEVEL=stop", 1),
    Case("LMI_SLEEP_LEVEL=1", 1, enables=True),
    Case("LMI_SLEEP_LEVEL=2 LMI_SLEEP_AFTER_SECONDS=60", 2, enables=True),
    Case("LMI_SLEEP_LEVEL=1", 1, "option.enable_sleep_mode=true", enables=True),
    Case("LMI_SLEEP_LEVEL=1", 1, "option.enable_sleep_mode=false", enables=False,
         fails="needs sleep mode, but enable_sleep_mode (serving.properties line 2) is false"),
    Case("LMI_SLEEP_LEVEL=2", 0, fails="needs a GPU: on a CPU vLLM refuses enable_sleep_mode"),
    Case("LMI_SLEEP_LEVEL=3", 1, fails="allowed are stop, 1, 2"),
    Case("LMI_SLEEP_AFTER_SECONDS=soon", 1, fails="LMI_SLEEP_AFTER_SECONDS"),
    Case("LMI_WAKE_TIMEOUT=-1", 1, fails="LMI_WAKE_TIMEOUT"),
    Case("LMI_SLEEP_AFTER_SECONDS=60", 8,
         "option.nnodes=2\noption.node_rank=0\noption.master_addr=10.0.0.1",
         fails="engines of other nodes are not ended and started from here"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.variables} {case.given[:20]}")
def test_sleep_and_what_it_needs(case: Case) -> None:
    """Levels of vLLM enable its sleep mode; what cannot be had is refused by name."""
    environ = dict(word.split("=") for word in case.variables.split())
    file = parse_properties(f"option.model_id=acme/m\n{case.given}")
    settings = load_settings(environ, extra_properties=file)
    translation = translate(settings, None, Devices(case.gpus))
    errors = (*settings.errors, *translation.errors)
    if case.fails:
        assert any(case.fails in error for error in errors), errors
        return
    assert not errors
    assert translation.arguments.values.get("enable_sleep_mode") is case.enables
    if case.enables and not case.given:
        assert str(translation.arguments.origins["enable_sleep_mode"]) == "LMI_SLEEP_LEVEL"
