"""Hooks around a request as the pipeline sees them, whatever loads and calls them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import StatusTable
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.hooks import NO_HOOKS, Hooks
from lmi_vllm.messages import InferenceCall, Reply, ServingProfile
from tests.conftest import ServeScripted
from tests.web.conftest import register


@dataclass
class Code:
    """Code of a model and of its adapters, by the name of the adapter."""

    hooks: Hooks = NO_HOOKS
    adapters: Mapping[str, Hooks] = field(default_factory=dict)

    async def load_adapter(self, name: str, _path: str, _options: Mapping[str, str]) -> Hooks:
        """Return the hooks of the adapter."""
        return self.adapters[name]

    async def begin(self, _engine: Engine) -> None:
        """Call nothing."""


@dataclass
class Say:
    """Both hooks: the payload and the answer are always the same."""

    payload: Mapping[str, Any] = field(default_factory=dict)
    answer: bytes = b""

    def undecoded(self, call: InferenceCall) -> Any:
        """Return the body as text."""
        return {"inputs": call.body.decode()}

    async def __call__(self, _: InferenceCall, given: Any, *rest: Any) -> Any:
        """Return the payload, and after vLLM's answer the answer."""
        return Reply(200, "text/plain", self.answer) if rest else {**given, **self.payload}


async def left_alone(_call: InferenceCall, _statuses: StatusTable) -> Reply | None:
    """Leave the request to the built-in handler."""
    return None


async def own_answer(_call: InferenceCall, _statuses: StatusTable) -> Reply | None:
    """Answer whatever is asked."""
    return Reply(200, "text/plain", b"own")


def test_hooks_of_an_adapter_win_one_by_one() -> None:
    """Each hook that an adapter lacks is the base model's; the handler is always that."""
    base_input, base_output, own_output = Say(), Say(answer=b"base"), Say(answer=b"own")
    base = Hooks(left_alone, base_input, base_output)
    assert Hooks(None, None, own_output).over(base) == Hooks(left_alone, base_input, own_output)


async def test_handler_answers_first(serve: ServeScripted) -> None:
    """None is for the built-in one to answer."""
    body = {"inputs": "x"}
    client = await serve(code=Code(Hooks(own_answer)))
    assert await (await client.post("/invocations", json=body)).read() == b"own"
    client = await serve(code=Code(Hooks(left_alone)))
    assert "generated_text" in await (await client.post("/invocations", json=body)).json()


async def test_input_hook_reads_any_body_but_chooses_no_adapter(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """Selection comes first: another tenant's adapter is out of the hook's reach."""
    code = Code(Hooks(input=Say({"adapters": "b", "model": "b"})), {"a": NO_HOOKS, "b": NO_HOOKS})
    client = await serve(ServingProfile(model_name="demo", enable_lora=True), code=code)
    await register(client, "a", "b")
    headers = {"Content-Type": "audio/wav"}
    assert (await client.post("/invocations", data=b"x", headers=headers)).status == 200
    body = {"inputs": "x", "adapters": "a"}
    assert (await client.post("/invocations", json=body)).status == 200
    assert [job.adapter.name if job.adapter else None for job in engine.jobs] == [None, "a"]


@dataclass
class Formats:
    """An input formatter: the payload that it makes has what it reads, and nothing else."""

    async def __call__(self, _: InferenceCall, given: Any) -> Any:
        """Return the inputs alone."""
        return {"inputs": given["inputs"]}

    def undecoded(self, call: InferenceCall) -> Any:
        """Return the body as text."""
        return {"inputs": call.body.decode()}


async def test_base_model_answers_for_no_unknown_model_of_a_hooked_request(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """The formatter leaves `model` out, so it is looked at before."""
    code = Code(Hooks(input=Formats()), {"a": NO_HOOKS})
    client = await serve(ServingProfile(model_name="demo", enable_lora=True), code=code)
    await register(client, "a")
    for model, status in (("unknown", 424), (["a"], 424), ("a", 200), ("lmi", 200), (None, 200)):
        answer = await client.post("/invocations", json={"inputs": "x", "model": model})
        assert answer.status == status, model
    assert [job.adapter and job.adapter.name for job in engine.jobs] == ["a", None, None]


async def test_prompts_of_a_list_are_answered_by_the_hooks_of_their_adapters(
    serve: ServeScripted,
) -> None:
    """What is no JSON is text in the list; results stay in order."""
    code = Code(adapters={"a": Hooks(output=Say(answer=b"plain\n")), "b": NO_HOOKS})
    client = await serve(ServingProfile(model_name="demo", enable_lora=True), code=code)
    await register(client, "a", "b")
    body = {"inputs": ["x", "y"], "adapters": ["b", "a"]}
    first, second = await (await client.post("/invocations", json=body)).json()
    assert first["generated_text"].startswith(" x")
    assert second == "plain"
