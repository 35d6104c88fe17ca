"""An adapter of modules that vLLM passes over is refused by name, in every architecture.

Seen red without the question to the workers: the adapters were loaded, and answered as the base.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm.workarounds.ignored_modules import AdapterInspection
from lmi_vllm.errors import AdapterRefusedError, EngineFailureError
from tests.contract.adapter_loader import Loader
from tests.contract.conftest import LoopThread, start_demo_engine
from tests.support.adapter_files import WEIGHTS, write_safetensors

pytestmark = pytest.mark.vllm


class OperatorsExtension:
    """What an operator adds to the workers, in the way that our class is added."""

    def answer_the_operator(self) -> str:
        """Return something that only this class says."""
        return "added"


@pytest.fixture(scope="module")
def bigcode(run: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A tiny GPT-BigCode, whose `c_attn` has no LoRA layer in vLLM."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.gpt_bigcode import tiny_gpt_bigcode  # noqa: PLC0415 (imports torch)

    folder = tiny_gpt_bigcode(tmp_path_factory.mktemp("models") / "bigcode")
    added = f"{__name__}.{OperatorsExtension.__name__}"
    engine = start_demo_engine(
        run,
        model=str(folder),
        worker_extension_cls=added,
        scheduler_cls="tests.support.operators_scheduler.OperatorsScheduler",
    )
    yield engine
    run(engine.close())


def test_modules_that_vllm_ignores_are_refused(
    run: LoopThread, bigcode: Engine, tmp_path: Path
) -> None:
    """Alone and beside others; nothing of them stays, and an adapter of the others has effect.

    Also where the operator extends the workers, whose own methods are there, too.
    """
    from tests.support.gpt_bigcode import gpt_bigcode_adapter  # noqa: PLC0415

    loader = Loader(run, bigcode)
    assert run(loader.engine._llm.collective_rpc("answer_the_operator")) == ["added"]
    base = loader.ask()
    others = loader.engine.adapters.shared, sorted(loader.engine.adapters.folder.path.glob("*/"))
    attention = gpt_bigcode_adapter(tmp_path / "attention", "attn.c_attn")
    both = gpt_bigcode_adapter(tmp_path / "both", "attn.c_attn", "mlp.c_fc")
    for folder in (attention, both):
        with pytest.raises(AdapterRefusedError, match=r"h\.0\.attn\.c_attn"):
            loader.load(folder)
    adapters = loader.engine.adapters
    assert (adapters.shared, sorted(adapters.folder.path.glob("*/"))) == others
    dense = loader.load(gpt_bigcode_adapter(tmp_path / "dense", "mlp.c_fc"))
    assert loader.ask(dense) != base
    assert loader.ask() == base


def test_plain_vllm_loads_an_adapter_whose_modules_it_ignores(
    run: LoopThread, bigcode: Engine, tmp_path: Path
) -> None:
    """By its own call, past ours: it says that all is well, and answers as the base model."""
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    from tests.support.gpt_bigcode import gpt_bigcode_adapter  # noqa: PLC0415

    folder = gpt_bigcode_adapter(tmp_path / "attention", "attn.c_attn")
    core = Loader(run, bigcode).engine._llm.engine_core
    assert run(core.add_lora_async(LoRARequest("ignored", 77, str(folder)))) is True
    assert run(core.remove_lora_async(77)) is True


def test_weights_that_the_model_takes_for_one_are_refused(
    run: LoopThread, bigcode: Engine, tmp_path: Path
) -> None:
    """Each pair of factors was checked; the engine would multiply one's with the other's."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 (slow to import)

    from tests.support.gpt_bigcode import gpt_bigcode_adapter  # noqa: PLC0415

    folder = gpt_bigcode_adapter(tmp_path / "twice", "mlp.c_fc")
    tensors = load_file(folder / WEIGHTS)
    names = {name: name.replace(".transformer.h.", ".model.h.") for name in tensors}
    other = {names[name]: one.clone() for name, one in tensors.items()}
    save_file(tensors | other, folder / WEIGHTS)
    loader = Loader(run, bigcode)
    with pytest.raises(AdapterRefusedError, match="are one weight of the model"):
        loader.load(folder)


class Worker(AdapterInspection):
    """VLLM's worker, of a model that passes modules over; it would read the adapter."""

    def __init__(self) -> None:
        model = SimpleNamespace(lora_skip_prefixes=["vision_model.", "layers.3."])
        manager = SimpleNamespace(_adapter_manager=SimpleNamespace(model=model))
        self.model_runner = SimpleNamespace(lora_manager=manager)

    def add_lora(self, _: object) -> None:
        """Read it."""


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (("vision_model.fc1", "model.layers.3.cross_attn.q_proj"),
         "model.layers.3.cross_attn.q_proj, vision_model.fc1 of this model"),
        (("vision_model.fc1", "model.layers.2.self_attn.q_proj"), ""),
        (("model.players.3.q_proj",), ""),
    ],
)  # fmt: skip
def test_adapter_of_modules_that_the_model_passes_over_names_them(
    tmp_path: Path, modules: tuple[str, ...], said: str
) -> None:
    """Llama 3.2 Vision's pictures: vLLM ends in a StopIteration without a text. One more counts."""
    names = [f"base_model.model.{module}.lora_{part}.weight" for module in modules for part in "AB"]
    write_safetensors(tmp_path / WEIGHTS, dict.fromkeys(names, (1, 1)))
    kind, reason = Worker().lmi_add_adapter("a", 1, str(tmp_path))
    assert kind == ("other" if said else "")
    assert said in reason


def test_request_that_is_not_finite_ends_with_an_operators_scheduler(
    run: LoopThread, bigcode: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours is joined with it; alone it answered with nothing, and others after it, too."""
    import torch  # noqa: PLC0415 (slow to import)
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    from tests.support.gpt_bigcode import gpt_bigcode_adapter  # noqa: PLC0415

    monkeypatch.setattr("lmi_vllm.engine.vllm.adapter_files.check_values", lambda *_: None)
    loader = Loader(run, bigcode)
    base = loader.ask()
    bad = gpt_bigcode_adapter(tmp_path / "bad", "mlp.c_fc")
    tensors = load_file(bad / WEIGHTS)
    nan = {name: torch.full_like(one, float("nan")) for name, one in tensors.items()}
    save_file(nan, bad / WEIGHTS)
    with pytest.raises(EngineFailureError, match="not finite"):
        loader.ask(loader.load(bad))
    assert loader.ask() == base
