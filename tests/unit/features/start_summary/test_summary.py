"""The summary of a start: what it says, and that it stays on one screen."""

from lmi_vllm.features.start_summary.summary import StartSummary
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.inference.start_progress import Phase
from lmi_vllm.messages import EngineArguments, ModelArtifacts, Origin, OriginKind, ServingProfile
from lmi_vllm.server.plan import StartPlan
from lmi_vllm.translate.arguments import Translation
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings


def summary(given: int) -> StartSummary:
    """Return the summary of a start with so many arguments set, and one at its default."""
    values = {f"argument_{number}": number for number in range(given)}
    file = Origin(OriginKind.FILE, "/opt/ml/model/serving.properties", 2)
    origins = dict.fromkeys(values, file) | {"model": Origin(OriginKind.FLAG, "--model")}
    values |= {"quiet": 1, "model": "/m"}
    lifecycle = Lifecycle()
    lifecycle.start.enter(Phase.ENGINE)
    lifecycle.set_state(State.HEALTHY)
    model = ModelArtifacts("tiny", "https://user:SENTINEL@host/m", "/m")
    arguments = EngineArguments(values, origins)
    found = Translation(load_settings({}), model, Devices(), arguments, ServingProfile())
    plan = StartPlan(model, found, values)
    return StartSummary(
        plan, InferenceService(RequestQueue(lifecycle)), "http://h:1", "curl -s http://h:1"
    )


def test_the_screen_says_model_source_origins_and_phases() -> None:
    """Origins without the folder of their file; no login of a URL."""
    text = "\n".join(summary(2).lines())
    assert "serves tiny\n  model from https://***@host/m  (--model)\n" in text
    assert "    argument_1 = 1  (serving.properties line 2)\n" in text
    assert "(2 more at their defaults)" in text
    assert "quiet" not in text
    assert "start: settings 0.0 s, engine 0.0 s; 0.0 s together" in text


def test_the_screen_has_an_end() -> None:
    """Also with more arguments than lines, whatever their length."""
    lines = summary(200).lines()
    assert len(lines) <= 26
    assert lines[-3] == "    and 180 more: see lmi-vllm explain"


def test_machines_get_everything() -> None:
    """As fields: each argument with its origin, seconds as numbers, URL and command."""
    fields = summary(200).fields()
    arguments = fields["engine_arguments"]
    assert isinstance(arguments, dict)
    assert len(arguments) == 202
    assert arguments["quiet"] == {"value": 1, "origin": "default"}
    assert fields["phase_seconds"] == {"settings": 0.0, "engine": 0.0}
    assert (fields["url"], fields["curl"]) == ("http://h:1", "curl -s http://h:1")
    assert "SENTINEL" not in str(fields)
