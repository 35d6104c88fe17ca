"""Other names of an adapter's weights: found if every one then fits the base, and only then."""

from collections.abc import Mapping

import pytest

from lmi_vllm.checks.adapter_names import fitting_names
from lmi_vllm.checks.safetensors_header import Shape, Tensor

ROOT = "base_model.model."
LAYER = "layers.{}.self_attn.q_proj"
SIDES = {"lora_A": (8, 32), "lora_B": (64, 8)}


def adapter(name: str, part: str = "{}.weight") -> dict[str, Tensor]:
    """The weights of two modules by this name."""
    return {
        f"{name.format(layer)}.{part.format(side)}": Tensor("F32", shape, 0)
        for layer in range(2)
        for side, shape in SIDES.items()
    }


def base(*prefixes: str, shape: Shape = (64, 32)) -> Mapping[str, Shape]:
    """The shapes of a model with two such layers at each of these places."""
    layers = [prefix + LAYER.format(layer) for prefix in prefixes for layer in range(2)]
    return dict.fromkeys(layers, shape)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (f"{ROOT}_orig_mod.model.{LAYER}", "{}.weight"),
        (f"_orig_mod.{ROOT}model.{LAYER}", "{}.weight"),
        (f"{ROOT}model._orig_mod.{LAYER}", "{}.weight"),
        (f"module.{ROOT}model.{LAYER}", "{}.weight"),
        (f"{ROOT}module.model.{LAYER}", "{}.weight"),
        (f"{ROOT}model.{LAYER}", "{}.default.weight"),
        (f"_orig_mod.module.{ROOT}model.{LAYER}", "{}.default.weight"),
    ],
)
@pytest.mark.parametrize("shapes", [base("model."), {}], ids=["known base", "unknown base"])
def test_words_of_wrappers_are_left_out(name: str, part: str, shapes: Mapping[str, Shape]) -> None:
    """Those of torch.compile, of data parallel, and PEFT's name for an adapter."""
    names = fitting_names(adapter(name, part), shapes)
    assert set(names.values()) == set(adapter(f"{ROOT}model.{LAYER}"))


@pytest.mark.parametrize(
    ("trained", "served"),
    [
        ("model.", "model.language_model."),
        ("model.", "language_model.model."),
        ("", "model."),
        ("model.", ""),
        ("model.language_model.", "model."),
    ],
)
def test_prefix_is_that_of_the_base(trained: str, served: str) -> None:
    """A text model's adapter in a model of several, and one of another class of the same model."""
    names = fitting_names(adapter(ROOT + trained + LAYER), base(served))
    assert set(names.values()) == set(adapter(ROOT + served + LAYER))
    heads = {f"{ROOT}lm_head.lora_A.weight": Tensor("F32", (8, 32), 0)}
    assert (
        not heads.keys()
        & fitting_names(adapter(ROOT + trained + LAYER) | heads, base(served)).keys()
    )


@pytest.mark.parametrize("layers", [adapter(ROOT + LAYER), {}], ids=["and layers", "alone"])
@pytest.mark.parametrize("served", ["model.", "model.language_model."])
def test_embedding_without_a_prefix_is_found(layers: dict[str, Tensor], served: str) -> None:
    """`AutoModel` has none, so the embedding's name is one word; PEFT saves its weight, too."""
    embedding = f"{ROOT}embed_tokens"
    weights = layers | {
        f"{embedding}.lora_embedding_A": Tensor("F32", (8, 512), 0),
        f"{embedding}.lora_embedding_B": Tensor("F32", (32, 8), 0),
        f"{embedding}.base_layer.weight": Tensor("F32", (512, 32), 0),
    }
    names = fitting_names(weights, base(served) | {f"{served}embed_tokens": (512, 32)})
    assert names == {name: name.replace(ROOT, ROOT + served) for name in weights}


def test_text_model_is_taken_of_several_that_fit() -> None:
    """A tower may have the same layers. If no word says which is the text's, none is taken."""
    weights = adapter(f"{ROOT}model.{LAYER}")
    names = fitting_names(weights, base("vision_tower.", "language_model."))
    assert all(name.startswith(f"{ROOT}language_model.") for name in names.values())
    assert not fitting_names(weights, base("vision_tower.", "audio_tower."))


@pytest.mark.parametrize(
    "shapes",
    [
        base("model."),  # it fits already
        base("model.language_model.", shape=(64, 33)),
        {LAYER.format(0): (64, 32)},  # one of two
        {"other": (64, 32)},
    ],
    ids=["as it is", "another shape", "not all", "nothing"],
)
def test_nothing_is_renamed_unless_all_of_it_fits(shapes: Mapping[str, Shape]) -> None:
    """Half a renaming would answer as half an adapter."""
    assert not fitting_names(adapter(f"{ROOT}model.{LAYER}"), shapes)
