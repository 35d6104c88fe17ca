"""Model classes of ours: classes of vLLM that read the weights of a family it dropped.

Each is a class vLLM has and a generator that renames, splits or repeats tensors while they are
loaded; architectures.py says which checkpoint gets which, and config/models.md shows that
the answers are Transformers'. Quantized tensors of these families are not translated.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any, Final

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.bloom import BloomForCausalLM, _get_alibi_slopes
from vllm.model_executor.models.dbrx import DbrxForCausalLM as VllmDbrx
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

Weights = Iterable[tuple[str, torch.Tensor]]

_QWEN_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "transformer.h.": "model.layers.",
        "transformer.wte.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".attn.c_proj.": ".self_attn.o_proj.",
        ".mlp.w1.": ".mlp.up_proj.",
        ".mlp.w2.": ".mlp.gate_proj.",  # modeling_qwen.py: w1(x) * silu(w2(x))
        ".mlp.c_proj.": ".mlp.down_proj.",
    }
)
_MPT_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "transformer.blocks.": "transformer.h.",
        "transformer.wte.": "transformer.word_embeddings.",
        "transformer.norm_f.": "transformer.ln_f.",
        ".norm_1.": ".input_layernorm.",
        ".norm_2.": ".post_attention_layernorm.",
        ".attn.Wqkv.": ".self_attention.query_key_value.",
        ".attn.out_proj.": ".self_attention.dense.",
        ".ffn.up_proj.": ".mlp.dense_h_to_4h.",
        ".ffn.down_proj.": ".mlp.dense_4h_to_h.",
    }
)


_MLLAMA_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "language_model.model.": "model.",  # as published
        "model.language_model.": "model.",  # as Transformers 5 has it
        "language_model.lm_head.": "lm_head.",
    }
)
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")


class DbrxForCausalLM(VllmDbrx):
    """DBRX whose experts are found.

    vLLM 0.24 to 0.33 moved them to `experts.routed_experts` and looks for the checkpoint's
    `experts.mlp` (vLLM issue 49004: KeyError 'blocks.0.ffn.experts.w13_weight').
    """

    def load_weights(self, weights: Weights) -> Any:
        """Load the checkpoint's tensors under the names vLLM has now."""
        moved = (
            (name.replace(".experts.mlp.", ".experts.routed_experts.mlp."), weight)
            for name, weight in weights
        )
        return super().load_weights(moved)


class BaichuanForCausalLM(LlamaForCausalLM):
    """Baichuan-7B: Llama whose queries, keys and values lie in one tensor."""

    def load_weights(self, weights: Weights) -> Any:
        """Load `W_pack` as three."""
        return super().load_weights(_unpacked(weights))


class Baichuan2ForCausalLM(BaichuanForCausalLM):
    """Baichuan2-7B: the rows of its head are unit vectors when they are used (`NormHead`)."""

    def load_weights(self, weights: Weights) -> Any:
        """Normalise the head once; to do it twice changes nothing."""
        return super().load_weights(
            (name, torch.nn.functional.normalize(weight) if name == "lm_head.weight" else weight)
            for name, weight in weights
        )


class _AlibiAttention(torch.nn.Module):
    """Llama's attention with ALiBi in the place of rotary positions."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        cache_config: Any,
        quant_config: Any,
        prefix: str,
        **_: object,
    ) -> None:
        super().__init__()
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        own, size = num_heads // ranks, hidden_size // num_heads
        self.qkv_proj = QKVParallelLinear(
            hidden_size, size, num_heads, bias=False, quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            hidden_size, hidden_size, bias=False, quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        slopes = _get_alibi_slopes(num_heads).tolist()[rank * own : (rank + 1) * own]
        self.attn = Attention(
            own, size, size**-0.5, alibi_slopes=slopes, cache_config=cache_config,
            quant_config=quant_config, prefix=f"{prefix}.attn",
        )  # fmt: skip

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Attend; where a token stands is in the slopes."""
        fused, _ = self.qkv_proj(hidden_states)
        attended, _ = self.o_proj(self.attn(*fused.chunk(3, dim=-1)))
        return attended


class _AlibiLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: Any, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=_AlibiAttention)


class _WithAlibi:
    """Stands before a Llama class and changes its layers."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=_AlibiLayer)  # type: ignore[call-arg]


class BaichuanAlibiForCausalLM(_WithAlibi, BaichuanForCausalLM):
    """Baichuan-13B."""


class Baichuan2AlibiForCausalLM(_WithAlibi, Baichuan2ForCausalLM):
    """Baichuan2-13B."""


class MllamaTextForCausalLM(LlamaForCausalLM):
    """Llama 3.2 Vision without eyes.

    Its layers that read pictures are skipped where there is none; what remains is Llama 3.1.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        text = deepcopy(vllm_config.model_config.hf_config.get_text_config())
        text.num_hidden_layers -= len(text.cross_attention_layers)
        text.architectures = ["LlamaForCausalLM"]
        super().__init__(vllm_config=vllm_config.with_hf_config(text), prefix=prefix)

    def load_weights(self, weights: Weights) -> Any:
        """Load the language model's tensors, its layers numbered without those left out."""
        return super().load_weights(self._of_text(weights))

    def _of_text(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        seeing = sorted(self.config.cross_attention_layers)
        for name, weight in _renamed(weights, _MLLAMA_NAMES):
            if not name.startswith(("model.embed", "model.layers.", "model.norm.", "lm_head.")):
                continue
            if name == "model.embed_tokens.weight":  # behind the vocabulary: the picture's tokens
                weight = weight[: self.config.vocab_size]  # noqa: PLW2901
            found = _LAYER.match(name)
            if found is None:
                yield name, weight
            elif (layer := int(found[1])) not in seeing:
                behind = sum(number < layer for number in seeing)
                yield name.replace(found[0], f"model.layers.{layer - behind}.", 1), weight


class DeciLMForCausalLM(LlamaForCausalLM):
    """DeciLM-7B: Llama whose layers differ in their number of key-value heads.

    Heads are repeated until every layer has as many as the largest, which computes the same.
    """

    def load_weights(self, weights: Weights) -> Any:
        """Load keys and values with as many heads as the configuration now says."""
        return super().load_weights(self._repeated(weights))

    def _repeated(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        counts, heads = self.config.num_key_value_heads_per_layer, self.config.num_key_value_heads
        for name, weight in weights:
            if ".k_proj." in name or ".v_proj." in name:
                own = counts[int(name.split(".")[2])]  # model.layers.N.…
                grouped = weight.unflatten(0, (own, -1))
                weight = grouped.repeat_interleave(heads // own, dim=0).flatten(0, 1)  # noqa: PLW2901
            yield name, weight


class QwenForCausalLM(Qwen2ForCausalLM):
    """Qwen of the first generation: Qwen2's layers under other names, attention in one tensor."""

    def load_weights(self, weights: Weights) -> Any:
        """Load the tensors under Qwen2's names."""
        return super().load_weights(_unpacked(_renamed(weights, _QWEN_NAMES), ".attn.c_attn."))


class MptForCausalLM(BloomForCausalLM):
    """MPT: BLOOM's layers without its biases and without the norm behind the embeddings."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.transformer.word_embeddings_layernorm = torch.nn.Identity()

    def load_weights(self, weights: Weights) -> Any:
        """Load the tensors under BLOOM's names and in its order; absent biases are zeros."""
        loaded = super().load_weights(self._as_bloom(weights))
        for name, parameter in self.named_parameters():
            if name.endswith(".bias") and name not in loaded:
                parameter.data.zero_()
                loaded.add(name)
        return loaded

    def _as_bloom(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        heads = self.config.num_attention_heads
        for name, weight in _renamed(weights, _MPT_NAMES):
            if ".query_key_value." in name:  # BLOOM's are grouped by head; BloomModel undoes it
                weight = weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)  # noqa: PLW2901
            yield name, weight


def _unpacked(weights: Weights, fused: str = ".self_attn.W_pack.") -> Iterator[Any]:
    """`weights` with each fused tensor as queries, keys and values."""
    for name, weight in weights:
        if fused not in name:
            yield name, weight
            continue
        for part, piece in zip("qkv", weight.chunk(3), strict=True):
            yield name.replace(fused, f".self_attn.{part}_proj."), piece


def _renamed(weights: Weights, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` under the names of another family."""
    for name, weight in weights:
        new = name
        for before, after in names.items():
            new = new.replace(before, after)
        yield new, weight
