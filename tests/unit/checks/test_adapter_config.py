"""Ranks and scales by pattern: as PEFT and vLLM resolve them, but never for long."""

import re
import time
from typing import Any

import pytest

from lmi_vllm.checks.adapter_config import engine_config, resolve_scales
from lmi_vllm.errors import AdapterRefusedError

MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.mlp.experts",
    "model.layers.1.mlp.experts.base_layer",
    "q_proj",
)


def config(**fields: Any) -> dict[str, Any]:
    """Return an adapter's configuration with `fields`."""
    return {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"} | fields


def vllm_scale(config: dict[str, Any], module: str) -> float:
    """Return the scale of a module by vLLM's rule (vllm/lora/peft_helper.py)."""
    name = module
    if module.endswith(".experts.base_layer"):
        name = module.removesuffix(".base_layer") + ".gate_up_proj"
    elif module.endswith(".experts"):
        name += ".down_proj"

    def found(patterns: dict[str, Any], default: Any) -> Any:
        matching = (v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", name))
        return next(matching, default)

    rank = found(config.get("rank_pattern", {}), config["r"])
    alpha = found(config.get("alpha_pattern", {}), config["lora_alpha"])
    return float(alpha / rank)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rank_pattern": {"q_proj": 4}},
        {"rank_pattern": {"q_proj": 4, "down_proj": 2}, "alpha_pattern": {"0.mlp.down_proj": 3}},
        {"alpha_pattern": {"layers.1.self_attn.q_proj": 5, "q_proj": 7, "proj": 9}},
        {"rank_pattern": {r".*\.layers\.[01]\..*": 4, "q_proj": 2}},
        {"rank_pattern": {"^q_proj": 4}, "alpha_pattern": {"(up|down)_proj": 32, r"\w+_proj": 64}},
        {"rank_pattern": {f"layers.{number}.q_proj": 4 for number in range(99)} | {"q_proj": 2}},
    ],
)
def test_scales_are_vllm_s_before_and_after(fields: dict[str, Any]) -> None:
    """Each module's scale is what vLLM makes of the source, and of what the engine gets."""
    source = config(**fields)
    scales = resolve_scales(source, MODULES, "x")
    given = engine_config(source, scales, MODULES, "x")
    for module in MODULES:
        wanted = vllm_scale(source, module)
        assert (scales.of(module), vllm_scale(given, module)) == (wanted, wanted)


def test_the_engine_gets_no_regular_expression() -> None:
    """Names only; what only training reads is gone."""
    source = config(
        target_modules=r"(.|.)*[!?]",
        exclude_modules=r"(.|.)*[!?]",
        layers_pattern=r"(.|.)*[!?]",
        layers_to_transform=[0],
        rank_pattern={r"(.|_)*\.q_proj": 4},
    )
    given = engine_config(source, resolve_scales(source, MODULES, "x"), MODULES, "x")
    assert given == {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["base_layer", "down_proj", "experts", "q_proj"],
        "rank_pattern": {
            r"^(?:model\.layers\.0\.self_attn\.q_proj|model\.layers\.1\.self_attn\.q_proj)": 4
        },
        "alpha_pattern": {},
    }


@pytest.mark.parametrize(
    ("field", "pattern", "text"),
    [
        ("rank_pattern", r"(.|.)*[!?]", "take longer than 2 s"),
        ("rank_pattern", r"(", "is not a regular expression"),
        ("alpha_pattern", r"(", "is not a regular expression"),
    ],
)
def test_a_pattern_that_never_ends_is_refused(field: str, pattern: str, text: str) -> None:
    """The child is ended; the message names the field."""
    since = time.monotonic()
    with pytest.raises(AdapterRefusedError, match=text) as refused:
        resolve_scales(config(**{field: {pattern: 16}}), MODULES, "my-source")
    assert time.monotonic() - since < 30  # where no CPU is to be had; usually two seconds
    assert "my-source" in refused.value.text
    assert field in refused.value.text


def test_too_many_names_for_the_engine_are_refused() -> None:
    """What the engine would have to compile has an end as well."""
    modules = [f"model.layers.{number}.{'x' * 200}" for number in range(2000)]
    source = config(rank_pattern={".*x": 4})
    with pytest.raises(AdapterRefusedError, match="would stall the engine"):
        engine_config(source, resolve_scales(source, modules, "x"), modules, "x")


@pytest.mark.parametrize("alpha", [1e300, float("nan"), float("inf"), 10**400, "16", None, True])
def test_alpha_is_a_number_of_usual_size(alpha: object) -> None:
    """JSON as Python reads it knows NaN, Infinity and integers of any length."""
    for fields in ({"lora_alpha": alpha}, {"alpha_pattern": {"nothing": alpha}}):
        with pytest.raises(AdapterRefusedError, match="lora_alpha must be a number"):
            resolve_scales(config(**fields), MODULES, "x")
