"""Model classes of ours: classes of vLLM that read the weights of a family it dropped.

Each is a class that vLLM has, with a generator that renames, splits or repeats tensors while they
are loaded. architectures.py says which checkpoint gets which class. config/models.md shows that the
answers are Transformers' (DistilBERT's: tests/contract/test_pooling.py). Quantized tensors of these
families are not translated; adapters are.
"""

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Final

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.bert import BertEmbeddingModel, BertForSequenceClassification
from vllm.model_executor.models.bloom import BloomForCausalLM, _get_alibi_slopes
from vllm.model_executor.models.dbrx import DbrxForCausalLM as VllmDbrx
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from lmi_vllm.features.legacy_models.tensor_names import (
    DISTILBERT_NAMES,
    FUSED_QKV,
    MLLAMA_NAMES,
    MPT_NAMES,
    QWEN_NAMES,
    Weights,
    renamed,
    renumbered_layers,
    split_qkv,
)

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
# The head that predicts masked words: vectors have no use for it.
_MASKED_WORDS: Final = ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.")


class DbrxForCausalLM(VllmDbrx):
    """DBRX with the experts of the checkpoint under vLLM's present names.

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

    packed_modules_mapping: dict[str, list[str]] = dict(FUSED_QKV)  # noqa: RUF012 (vLLM's name)
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={".self_attn.W_pack.": ".self_attn.qkv_proj."}
    )

    def load_weights(self, weights: Weights) -> Any:
        """Load `W_pack` split into queries, keys and values."""
        return super().load_weights(split_qkv(weights))


class Baichuan2ForCausalLM(BaichuanForCausalLM):
    """Baichuan2-7B: the rows of its head are unit vectors when they are used (`NormHead`)."""

    def load_weights(self, weights: Weights) -> Any:
        """Load the head normalised; normalising is idempotent."""
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
        """Return the attention's output; positions enter by the ALiBi slopes alone."""
        fused, _ = self.qkv_proj(hidden_states)
        attended, _ = self.o_proj(self.attn(*fused.chunk(3, dim=-1)))
        return attended


class _AlibiLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: Any, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=_AlibiAttention)


class _WithAlibi:
    """A mixin before a Llama class that gives its layers ALiBi."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=_AlibiLayer)  # type: ignore[call-arg]


class BaichuanAlibiForCausalLM(_WithAlibi, BaichuanForCausalLM):
    """Baichuan-13B."""


class Baichuan2AlibiForCausalLM(_WithAlibi, Baichuan2ForCausalLM):
    """Baichuan2-13B."""


class MllamaTextForCausalLM(LlamaForCausalLM):
    """Llama 3.2 Vision for text only.

    Its layers that read pictures are skipped where there is none; what remains is Llama 3.1.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        text = deepcopy(vllm_config.model_config.hf_config.get_text_config())
        renumbered = renumbered_layers(text.num_hidden_layers, text.cross_attention_layers)
        text.num_hidden_layers -= len(text.cross_attention_layers)
        text.architectures = ["LlamaForCausalLM"]
        super().__init__(vllm_config=vllm_config.with_hf_config(text), prefix=prefix)
        # What an adapter changes there never counts: a request with a picture is refused.
        self.lora_skip_prefixes = [*(f"layers.{layer}." for layer in text.cross_attention_layers),
                                   "vision_model.", "multi_modal_projector."]  # fmt: skip
        self.hf_to_vllm_mapper = WeightsMapper(
            orig_to_new_regex=renumbered, orig_to_new_prefix=dict(MLLAMA_NAMES)
        )

    def load_weights(self, weights: Weights) -> Any:
        """Load the language model's tensors, its layers numbered without those left out."""
        return super().load_weights(self._of_text(weights))

    def _of_text(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        cross_attention = sorted(self.config.cross_attention_layers)
        for name, weight in renamed(weights, MLLAMA_NAMES):
            if not name.startswith(("model.embed", "model.layers.", "model.norm.", "lm_head.")):
                continue
            if name == "model.embed_tokens.weight":  # behind the vocabulary: the picture's tokens
                weight = weight[: self.config.vocab_size]  # noqa: PLW2901
            match = _LAYER.match(name)
            if match is None:
                yield name, weight
            elif (layer := int(match[1])) not in cross_attention:
                behind = sum(number < layer for number in cross_attention)
                yield name.replace(match[0], f"model.layers.{layer - behind}.", 1), weight


class DeciLMForCausalLM(LlamaForCausalLM):
    """DeciLM-7B: Llama whose layers differ in their number of key-value heads.

    Heads are repeated until every layer has as many as the largest, which computes the same. Those
    of an adapter are not: of the layers whose heads are repeated, keys and values have none.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        counts, heads = self.config.num_key_value_heads_per_layer, self.config.num_key_value_heads
        fewer = "|".join(str(layer) for layer, own in enumerate(counts) if own != heads)
        repeated = re.compile(rf"\.layers\.({fewer})\.self_attn\.([kv]_proj)\.")
        self.hf_to_vllm_mapper = WeightsMapper(
            orig_to_new_regex={repeated: r".layers.\1.repeated_heads.\2."} if fewer else {}
        )

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


class GPTBigCodeForCausalLM(TransformersForCausalLM):  # type: ignore[misc,unused-ignore]
    """StarCoder and Octocoder, whose adapters may change `c_attn`.

    vLLM 0.31 to 0.33 make it a `QKVParallelLinear` and do not say that it is one weight, which its
    LoRA layers ask for: adapters were passed over.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.packed_modules_mapping["c_attn"] = ["c_attn"]


class QwenForCausalLM(Qwen2ForCausalLM):
    """Qwen of the first generation: Qwen2's layers under other names, attention in one tensor."""

    packed_modules_mapping: dict[str, list[str]] = dict(FUSED_QKV)  # noqa: RUF012 (vLLM's name)
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr=dict(QWEN_NAMES) | {".attn.c_attn.": ".self_attn.qkv_proj."}
    )

    def load_weights(self, weights: Weights) -> Any:
        """Load the tensors under Qwen2's names."""
        return super().load_weights(split_qkv(renamed(weights, QWEN_NAMES), ".attn.c_attn."))


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
        for name, weight in renamed(weights, MPT_NAMES):
            if ".query_key_value." in name:  # BLOOM's are grouped by head; BloomModel undoes it
                weight = weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)  # noqa: PLW2901
            yield name, weight


def _as_bert(weights: Weights, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors under BERT's names, the encoder's behind `prefix`; a token type is zero."""
    for name, weight in renamed(weights, DISTILBERT_NAMES):
        if name.startswith(_MASKED_WORDS):
            continue
        is_encoders = name.startswith(("embeddings.", "encoder."))
        yield (prefix + name if is_encoders else name), weight
        if name == "embeddings.word_embeddings.weight":
            types = f"{prefix}embeddings.token_type_embeddings.weight"
            yield types, torch.zeros(1, weight.shape[1], dtype=weight.dtype)


class DistilBertModel(BertEmbeddingModel):  # type: ignore[misc,unused-ignore]
    """DistilBERT that makes vectors."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr=dict(DISTILBERT_NAMES),
        orig_to_new_prefix={"encoder.": "model.encoder.", "embeddings.": "model.embeddings."},
    )

    def load_weights(self, weights: Weights) -> Any:
        """Load the encoder's tensors under BERT's names."""
        return super().load_weights(_as_bert(weights))


class DistilBertForSequenceClassification(BertForSequenceClassification):  # type: ignore[misc,unused-ignore]
    """DistilBERT that classifies: what is BERT's pooler is a layer of its head, with ReLU."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr=dict(DISTILBERT_NAMES),
        orig_to_new_prefix={"encoder.": "bert.encoder.", "embeddings.": "bert.embeddings."},
    )

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.bert.pooler.act_fn = torch.nn.ReLU()

    def load_weights(self, weights: Weights) -> Any:
        """Load the encoder's tensors under BERT's names, and the head's."""
        return super().load_weights(_as_bert(weights, "bert."))
