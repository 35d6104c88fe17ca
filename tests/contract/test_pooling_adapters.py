"""Adapters of models that embed or classify: each route of vLLM's that takes a `model` has its own.

The embedded model is converted by vLLM, so its two adapters fit.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pytest

from lmi_vllm.checks.safetensors_header import rename_tensors
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import Engine
from lmi_vllm.messages import AdapterRef, HttpCall, RouteKind
from tests.contract.conftest import DEMO_ADAPTERS, LoopThread, start_demo_engine
from tests.support.adapter_files import WEIGHTS, read_header

pytestmark = pytest.mark.vllm
TYPES: Final = [(b"content-type", b"application/json")]
PAIR: Final = {"text_1": "rain", "text_2": "sea"}
RANKED: Final = {"query": "rain", "documents": ["sea", "rain"]}
BODIES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "embed": {
            "/v1/embeddings": {"input": "the moon"},
            "/v2/embed": {"texts": ["the moon"], "embedding_types": ["float"]},
            "/pooling": {"input": "the moon"},
            "/score": PAIR, "/v1/score": PAIR,
            "/rerank": RANKED, "/v1/rerank": RANKED, "/v2/rerank": RANKED,
        },
        "classify": {"/classify": {"input": "the moon"}, "/pooling": {"input": "the moon"}},
    }
)  # fmt: skip
# The last two are of models that write, and answer 501 here.
WITHOUT_WEIGHTS: Final = {
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/v1/systemone",
    "/v1/decisions",
}


class Pooling(NamedTuple):
    """An engine with two adapters, and what it makes of texts."""

    run: LoopThread
    engine: Engine
    task: str
    adapters: tuple[AdapterRef, ...]

    def ask(self, *adapters: AdapterRef | None, path: str) -> list[Any]:
        """Return what the route answers for each, asked at once; without ids and times."""
        body = {**BODIES[self.task][path], "model": "lmi"}

        async def asked(adapter: AdapterRef | None) -> Any:
            content = json.dumps(body).encode()
            call = HttpCall("POST", path, "", TYPES, content, "an-id", adapter)
            reply = await self.engine.http.call(call)  # type: ignore[union-attr]
            assert reply.status == 200, reply.body
            answer = json.loads(reply.body)
            return answer.get("data") or answer.get("embeddings") or answer["results"]

        async def together() -> list[Any]:
            return await asyncio.gather(*map(asked, adapters))

        found: list[Any] = self.run(together())
        return found


@pytest.fixture(scope="module")
def headed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a head for two classes."""
    import torch  # noqa: PLC0415 (slow to import)
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    made = tmp_path_factory.mktemp("headed") / "model"
    shutil.copytree(DEMO_MODEL_DIR, made)
    tensors = load_file(made / "model.safetensors")
    width = tensors["model.norm.weight"].shape[0]
    tensors["score.weight"] = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


@pytest.fixture(scope="module", params=BODIES)
def pooling(
    run: LoopThread, headed_folder: Path, request: pytest.FixtureRequest
) -> Iterator[Pooling]:
    """An engine for each of the tasks."""
    folder = headed_folder if request.param == "classify" else DEMO_MODEL_DIR
    engine = start_demo_engine(run, model=str(folder), runner="pooling", convert=request.param)
    names = ("capitals", "json")
    refs = tuple(AdapterRef(name, str(DEMO_ADAPTERS / name), 40_000 + number)
                 for number, name in enumerate(names))  # fmt: skip
    for ref in refs:
        run(engine.load_adapter(ref))
    yield Pooling(run, engine, request.param, refs)
    run(engine.close())


def test_adapter_of_the_call_answers_on_each_route(pooling: Pooling) -> None:
    """Alone and beside the base model and another adapter, which answer otherwise."""
    assert pooling.engine.http is not None
    routes = [one for one in pooling.engine.http.routes if one.kind is RouteKind.INFERENCE]
    assert {one.path for one in routes} - WITHOUT_WEIGHTS == BODIES[pooling.task].keys()
    for path in BODIES[pooling.task]:
        who = (None, *pooling.adapters)
        alone = [pooling.ask(one, path=path)[0] for one in who]
        assert len({json.dumps(answer) for answer in alone}) == len(who), path
        for _ in range(2):
            together = pooling.ask(*who, path=path)
            assert [_rounded(answer) for answer in together] == [
                _rounded(answer) for answer in alone
            ], path


def test_adapter_without_the_prefix_answers_as_with_it(pooling: Pooling, tmp_path: Path) -> None:
    """PEFT writes none for AutoModel. VLLM packs copies of such modules, and leaves the others."""
    capitals = DEMO_ADAPTERS / "capitals"
    shutil.copytree(capitals, tmp_path / "bare")
    names = {
        name: name.replace("base_model.model.model.", "base_model.model.")
        for name in read_header(capitals / WEIGHTS)
    }
    rename_tensors(capitals / WEIGHTS, tmp_path / "bare" / WEIGHTS, names)
    ref = AdapterRef("bare", str(tmp_path / "bare"), 40_100)
    pooling.run(pooling.engine.load_adapter(ref))
    path = next(iter(BODIES[pooling.task]))
    bare, capital = (_rounded(pooling.ask(one, path=path)[0]) for one in (ref, pooling.adapters[0]))
    pooling.run(pooling.engine.unload_adapter(ref))
    assert bare == capital


def _rounded(value: Any) -> Any:
    """Return it without the last digits of numbers, which the batch moves."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-5)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items() if name != "id"}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
