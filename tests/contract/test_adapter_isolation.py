"""Adapters never answer for each other, and none can end the engine (engine/vllm/adapters.py).

Each test is one way in which vLLM 0.32 breaks that without our guards; each was seen red with its
guard taken out.
"""

import asyncio
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmi_vllm.errors import (
    AdapterCapacityError,
    AdapterRefusedError,
    NoAdapterSlotError,
    PayloadError,
)
from lmi_vllm.messages import (
    AdapterRef,
    GenerationChunk,
    GenerationJob,
    OpenAICall,
    TokenLogprob,
)
from tests.contract.adapter_loader import IDS, PROMPT, Loader, job
from tests.contract.conftest import DEMO_ADAPTERS, LoopThread, collect
from tests.contract.releases import since
from tests.support.adapter_files import (
    CAPITALS,
    CONFIG,
    WEIGHTS,
    copy_adapter,
    make_adapter,
    make_head_adapter,
    read_header,
    write_safetensors,
)

pytestmark = pytest.mark.vllm

# More than one block of 128 tokens: shorter prompts never hit the prefix cache on CPU.
LONG_PROMPT = "The sea is wide and the wind is cold. Water is a clear liquid. " * 12 + PROMPT


@pytest.fixture
def adapters(run: LoopThread, vllm_engine: Any) -> Iterator[Loader]:
    """Load adapters; the engine (max_loras=2, max_cpu_loras=2) is empty and alive afterwards."""
    loader = Loader(run, vllm_engine)
    yield loader
    for ref in loader.loaded:
        loader.unload(ref)
    run(vllm_engine.check_health())
    assert loader.ask() == loader.ask()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six adapters with weights of their own."""
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(root / f"a{seed}", seed) for seed in range(6)]


def test_base_and_adapters_differ_alone_and_in_one_batch(
    adapters: Loader, folders: list[Path]
) -> None:
    """Base and each of three adapters give their own answer, whatever else is in the batch."""
    refs = [
        None,
        adapters.load(DEMO_ADAPTERS / "capitals"),
        adapters.load(DEMO_ADAPTERS / "json"),
        adapters.load(folders[0]),
    ]
    alone = [adapters.ask(ref) for ref in refs]
    assert len(set(alone)) == 4
    for order in itertools.combinations(range(4), 3):
        mixed = adapters.ask_together(*(refs[position] for position in order))
        assert mixed == [alone[position] for position in order]


def test_base_rows_stay_base_with_every_slot_taken(adapters: Loader, folders: list[Path]) -> None:
    """On CPU vLLM computes base rows with the last adapter: our worker does not."""
    base = adapters.ask()
    refs = [adapters.load(folder) for folder in folders[:3]]
    for pair in itertools.combinations(refs, 2):
        first, second = (adapters.ask(ref) for ref in pair)
        mixed = adapters.ask_together(None, pair[0], None, pair[1], None)
        assert mixed == [base, first, base, second, base]


def test_more_adapters_than_slots_in_one_batch_queue(adapters: Loader, folders: list[Path]) -> None:
    """The scheduler does not count pinned slots: one adapter more than fits must wait here."""
    refs = [adapters.load(folder) for folder in folders]
    alone = [adapters.ask(ref) for ref in refs]
    assert len(set(alone)) == len(alone)
    for _ in range(3):
        assert adapters.ask_together(*refs) == alone
    pinned = adapters.load(folders[0], "pinned", pinned=True)
    assert adapters.ask_together(*refs, pinned) == [*alone, alone[0]]


def test_id_used_again_has_new_weights(adapters: Loader, folders: list[Path]) -> None:
    """The engine keeps the old weights of an id: they are removed, and cached prompts with them."""
    first, second = (adapters.load(folder) for folder in folders[:2])
    old, new = (adapters.ask(ref, LONG_PROMPT) for ref in (first, second))
    assert old != new
    adapters.unload(first)
    again = AdapterRef(first.name, second.path, first.engine_id)
    adapters.run(adapters.engine.load_adapter(again))
    assert adapters.ask(again, LONG_PROMPT) == new
    adapters.unload(again)


def test_two_loads_of_one_name_in_one_batch(adapters: Loader, folders: list[Path]) -> None:
    """A step compares adapters by name: old and new load of one name would end the engine."""
    old, new = (adapters.load(folder, "same") for folder in folders[:2])
    alone = [adapters.ask(ref) for ref in (old, new)]
    for folder in folders[2:4]:  # both are evicted from the slots
        adapters.ask(adapters.load(folder))
    assert adapters.ask_together(old, new) == alone


def test_loaded_id_keeps_to_its_adapter(adapters: Loader, folders: list[Path]) -> None:
    """Another adapter under an id that is in use is refused, not served with the old weights."""
    first = adapters.load(folders[0])
    with pytest.raises(AdapterRefusedError):
        adapters.run(
            adapters.engine.load_adapter(AdapterRef("other", str(folders[1]), first.engine_id))
        )


def test_evicted_adapter_answers_without_its_folder(
    adapters: Loader, folders: list[Path], tmp_path: Path
) -> None:
    """The engine reads an evicted adapter again inside a step; it reads our copy."""
    gone = copy_adapter(tmp_path / "gone", folders[0])
    first = adapters.load(gone)
    expected = adapters.ask(first)
    shutil.rmtree(gone)
    for folder in folders[1:5]:
        adapters.ask(adapters.load(folder))
    assert adapters.ask(first) == expected


def test_half_loaded_adapter_is_not_usable(adapters: Loader, tmp_path: Path) -> None:
    """After a shape error vLLM keeps the id, half loaded: it is removed and never served."""
    broken = copy_adapter(tmp_path / "broken")
    shapes = {
        name: tuple(entry["shape"]) for name, entry in read_header(CAPITALS / WEIGHTS).items()
    }
    wrong = {
        name: (rows + 32, columns) if "layers.3" in name and "lora_B" in name else (rows, columns)
        for name, (rows, columns) in shapes.items()
    }
    write_safetensors(broken / WEIGHTS, wrong)
    ref = AdapterRef("broken", str(broken), next(IDS))
    base = adapters.ask()
    with pytest.raises(AdapterRefusedError, match="broken"):
        adapters.run(adapters.engine.load_adapter(ref))
    assert ref.engine_id not in adapters.run(adapters.engine._llm.list_loras())
    with pytest.raises(PayloadError, match="not loaded"):
        adapters.ask(ref)
    assert adapters.ask() == base


def test_new_weights_under_old_name_and_path_miss_old_cached_prompts(
    adapters: Loader, folders: list[Path], tmp_path: Path
) -> None:
    """The prefix cache's key is name and path: each load has a path of its own."""
    expected = adapters.ask(adapters.load(folders[1], "other"), LONG_PROMPT)
    place = copy_adapter(tmp_path / "place", folders[0])
    old = adapters.load(place, "same")
    assert adapters.ask(old, LONG_PROMPT) != expected
    adapters.unload(old)
    copy_adapter(place, folders[1])
    assert adapters.ask(adapters.load(place, "same"), LONG_PROMPT) == expected


def test_all_slots_pinned_refuses_the_next_adapter(adapters: Loader, folders: list[Path]) -> None:
    """With every slot pinned vLLM dies of the next adapter: it is refused, in load and in use."""
    spare = adapters.load(folders[2])
    pinned = [adapters.load(folder, pinned=True) for folder in folders[:2]]
    with pytest.raises(AdapterCapacityError):
        adapters.load(folders[3])
    with pytest.raises(AdapterCapacityError):
        adapters.load(folders[3], pinned=True)
    with pytest.raises(NoAdapterSlotError, match="pinned"):
        adapters.ask(spare)
    alone = [adapters.ask(ref) for ref in (*pinned, None)]
    assert adapters.ask_together(*pinned, None) == alone


def test_pin_in_place_keeps_weights_and_waits_for_running_requests(
    adapters: Loader, folders: list[Path]
) -> None:
    """Pinning the last slot under a running request would end the engine: the pin waits."""
    running, first, second = (adapters.load(folder) for folder in folders[:3])
    expected = [adapters.ask(ref) for ref in (running, first, second)]

    async def pin(ref: AdapterRef) -> None:
        pinned = AdapterRef(ref.name, ref.path, ref.engine_id, pinned=True)
        await adapters.engine.load_adapter(pinned)

    async def scenario() -> Any:
        chunks = adapters.engine.generate(job(running))
        reading = asyncio.create_task(anext(chunks))
        while not adapters.engine.running_requests:  # noqa: ASYNC110 (vLLM has no event)
            await asyncio.sleep(0.01)
        await asyncio.gather(pin(first), pin(second))
        return (await reading).text

    assert adapters.run(scenario()) == expected[0]
    assert adapters.ask_together(first, second) == expected[1:]


def test_adapter_never_loaded_is_refused_by_generate(adapters: Loader) -> None:
    """An adapter straight into generate() kills vLLM's engine: only loaded ids get through."""
    for path in ("/no/such/folder", str(CAPITALS)):
        with pytest.raises(PayloadError, match="not loaded"):
            adapters.ask(AdapterRef("stranger", path, next(IDS)))


def test_prompt_logprobs_in_a_batch_equal_those_alone(
    adapters: Loader, folders: list[Path], tmp_path: Path
) -> None:
    """In one step with any other requests vLLM ends, or uses another request's adapter for them.

    An adapter of the output layer is needed to see the latter: only there are rows of the prompt
    computed with the adapters of the sampled rows.
    """
    head = adapters.load(make_head_adapter(tmp_path / "head", seed=77))
    body = adapters.load(folders[0])

    def asked(adapter: AdapterRef | None, **sampling: Any) -> GenerationJob:
        return job(adapter, 8, ignore_eos=True, **sampling)

    async def together(*jobs: GenerationJob, gap: float = 0) -> list[GenerationChunk]:
        async def one(index: int, item: GenerationJob) -> GenerationChunk:
            await asyncio.sleep(index * gap)
            return (await collect(adapters.engine, item))[-1]

        return await asyncio.gather(*(one(index, item) for index, item in enumerate(jobs)))

    refs = (None, head, body)
    alone = {
        ref: adapters.run(together(asked(ref, prompt_logprobs=0)))[0].prompt_logprobs
        for ref in refs
    }
    for gap in (0, 0.003, 0.02):  # all in one step; into the others' steps
        jobs = [asked(ref, **more) for more in ({}, {"prompt_logprobs": 0}) for ref in refs * 2]
        jobs.append(asked(None, prompt_logprobs=0, n=2, temperature=0.7))  # two inside vLLM
        *plain, _ = adapters.run(together(*jobs, gap=gap))
        assert [bool(chunk.prompt_logprobs) for chunk in plain] == [False] * 6 + [True] * 6
        for ref, chunk in zip(refs * 2, plain[6:], strict=True):
            assert _logprobs(chunk.prompt_logprobs) == pytest.approx(
                _logprobs(alone[ref]), abs=1e-3
            )
    apart = [_logprobs(alone[ref]) for ref in refs]
    assert all(
        max(abs(one - other) for one, other in zip(a, b, strict=True)) > 0.1
        for a, b in itertools.combinations(apart, 2)
    )


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[float]:
    return [token.logprob for token in tokens]


def test_unload_lets_running_request_finish(adapters: Loader, folders: list[Path]) -> None:
    """A request that runs while its adapter is unloaded, and evicted, ends with its own answer."""
    ref = adapters.load(folders[0])
    (expected,) = adapters.run(collect(adapters.engine, job(ref, 200, ignore_eos=True)))

    async def scenario() -> str:
        chunks = adapters.engine.generate(job(ref, 200, ignore_eos=True))
        reading = asyncio.create_task(anext(chunks))
        while not adapters.engine.running_requests:  # noqa: ASYNC110 (vLLM has no event)
            await asyncio.sleep(0.01)
        await adapters.engine.unload_adapter(ref)
        for folder in folders[1:5]:
            other = AdapterRef(folder.name, str(folder), next(IDS))
            adapters.loaded.append(other)
            await adapters.engine.load_adapter(other)
        chunk = await reading
        await chunks.aclose()
        return str(chunk.text)

    assert adapters.run(scenario()) == expected.text
    assert ref.engine_id not in adapters.run(adapters.engine._llm.list_loras())
    with pytest.raises(PayloadError, match="not loaded"):
        adapters.ask(ref)


def test_unload_removes_private_copy(adapters: Loader, folders: list[Path]) -> None:
    """Nothing of an adapter stays on disk once it is unloaded."""
    ref = adapters.load(folders[0])
    count = _private_copies(adapters)
    adapters.unload(ref)
    assert _private_copies(adapters) == count - 1


def test_openai_call_is_answered_by_the_load_it_carries(
    adapters: Loader, folders: list[Path]
) -> None:
    """Two loads of one name are told apart, and a bare name reaches neither."""
    first, second = (adapters.load(folder, "same") for folder in folders[:2])

    def complete(adapter: AdapterRef | None, model: str) -> dict[str, Any]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        call = OpenAICall("completions", body, {}, f"isolation-{next(IDS)}", adapter)
        reply = adapters.run(adapters.engine.answer_openai(call))
        document: dict[str, Any] = orjson.loads(reply.body)
        return document

    for ref in (first, second):
        document = complete(ref, "same")
        assert document["model"] == "same"
        assert document["choices"][0]["text"] == adapters.ask(ref)
    assert complete(None, "same")["error"]["code"] == 404


def _private_copies(adapters: Loader) -> int:
    return sum(1 for _ in adapters.engine.adapters.folder.path.iterdir())


@pytest.mark.parametrize(
    ("strength", "config"),
    [
        (float("nan"), {}),
        (1e18, {}),
        (0.02, {"lora_alpha": 1e300}),
        (0.02, {"rank_pattern": {"(.|.)*[!?]": 16}}),
        (0.02, {"alpha_pattern": {"(.|.)*[!?]": 16}}),
    ],
)
def test_harmful_content_never_reaches_the_engine(
    adapters: Loader, tmp_path: Path, strength: float, config: dict[str, Any]
) -> None:
    """What became harmful after its registration, too: the engine's own copy is checked."""
    with pytest.raises(AdapterRefusedError, match=r"finite|large|must be a number|longer than"):
        adapters.load(make_adapter(tmp_path / "bad", 1, strength, **config))
    assert not [*adapters.engine.adapters.folder.path.glob("*/")]


def test_pickle_is_loaded_as_its_tensors(adapters: Loader, tmp_path: Path) -> None:
    """The engine gets its tensors, checked like others; what is more than tensors is refused."""
    import torch  # noqa: PLC0415 (slow to import)
    from safetensors.torch import load_file  # noqa: PLC0415

    good = copy_adapter(tmp_path / "good")
    tensors = load_file(good / WEIGHTS)
    (good / WEIGHTS).unlink()
    torch.save(tensors, good / "adapter_model.bin")
    assert adapters.ask(adapters.load(good)) == adapters.ask(adapters.load(CAPITALS))
    for harmful in ({name: one * 1e20 for name, one in tensors.items()}, {"x": print}):
        torch.save(harmful, good / "adapter_model.bin")
        with pytest.raises(AdapterRefusedError, match=r"as large as|cannot be read"):
            adapters.load(good)


def test_strongest_allowed_adapter_does_not_change_other_answers(
    adapters: Loader, tmp_path: Path
) -> None:
    """Its own text is noise; the base's answers afterwards are what they were."""
    before = adapters.ask()
    strong = adapters.load(make_adapter(tmp_path / "strong", 1, 0.035))
    with pytest.raises(AdapterRefusedError, match="mean size"):
        adapters.load(make_adapter(tmp_path / "stronger", 1, 0.07))
    adapters.ask(strong, prompt=LONG_PROMPT)
    adapters.unload(strong)
    assert [adapters.ask() for _ in range(8)] == [before] * 8


@since("0.32", "0.31 reads no patterns, so that adapters with some are refused")
def test_patterns_become_names_with_the_same_answer(adapters: Loader, tmp_path: Path) -> None:
    """A scale given by a regular expression has its effect, and is none in the engine's copy."""
    plain = copy_adapter(tmp_path / "plain", lora_alpha=4)
    pattern = copy_adapter(tmp_path / "pattern", alpha_pattern={r".*\.(q|k|v|o)_proj": 4})
    config = json.loads((pattern / CONFIG).read_text())
    ref = adapters.load(pattern)
    given = next(iter(adapters.engine.adapters.folder.path.glob("*/" + CONFIG)))
    assert "(q|k" not in given.read_text()
    if set(config["target_modules"]) <= {"q_proj", "k_proj", "v_proj", "o_proj"}:
        assert adapters.ask(ref) == adapters.ask(adapters.load(plain))
    assert adapters.ask(ref) != adapters.ask(adapters.load(CAPITALS))


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ({"alpha_pattern": {"q_proj": 4}}, True),
        ({"alpha_pattern": {"nothing": 4}}, False),
        ({"alpha_pattern": {"q_proj": 32}}, False),
    ],
)
def test_scale_that_vllm_does_not_read_is_refused(
    adapters: Loader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    is_refused: bool,
) -> None:
    """By 0.31, which answered with one scale for all; what leaves all as they are is served."""
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    folder = copy_adapter(tmp_path / "own", **config)
    if is_refused:
        with pytest.raises(AdapterRefusedError, match=r"use vLLM 0.32 or later"):
            adapters.load(folder)
    else:
        adapters.load(folder)
