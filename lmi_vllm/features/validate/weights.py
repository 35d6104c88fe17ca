"""The weights of a decoder, counted from config.json: layers, parameters and bytes.

Norms, biases and rotary tables are left out: they are below a thousandth of every model here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from lmi_vllm.checks.model import is_of_transformers, number_of, text_part
from lmi_vllm.features.validate.kv_cache import ENCODERS, has_other_layers

# Families whose MLP has no gate: two matrices instead of three.
_WITHOUT_GATE: Final = (
    "apertus", "arcee", "bert", "biogpt", "bloom", "camembert", "codegen", "data2vec-text", "ernie",
    "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "jais2", "jina_embeddings_v3",
    "mpt", "nanochat", "nemotron", "opt", "persimmon", "phi", "roberta", "roberta-prelayernorm",
    "starcoder2", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
# Families that share the embedding with the output unless config.json says otherwise; of others
# the record of Transformers' classes says so.
_TIED: Final = ("bloom", "falcon", "gpt2", "gpt_bigcode", "mpt", "opt")
# Ends of architectures without an output of the vocabulary's size, in families of Transformers.
_WITHOUT_OUTPUT: Final = ("Model", "Classification", "RewardModel", "RewardModeling")
# Families with learned positions: a table of them, and of OPT's two rows more.
_LEARNED: Final = (
    "bert", "camembert", "data2vec-text", "ernie", "gpt2", "gpt_bigcode", "opt", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
# Mixture-of-experts families with the layers counted here; Jamba's differ.
_COUNTED_MIXTURES: Final = (
    "dbrx", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe",
    "gpt_oss", "granitemoe", "kimi_k2", "llama4", "llama4_text", "minimax_m2", "mixtral", "olmoe",
    "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text",
)  # fmt: skip
# Families with layers that share weights, narrower embeddings, or an embedding in each layer.
_NOT_COUNTED: Final = ("albert", "electra", "gemma4", "gemma4_text", "mobilebert", "squeezebert")
# Vision encoders whose MLP has a gate: three matrices instead of two.
_GATED_VISION: Final = ("pixtral", "qwen2_5_vl")
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_MXFP4_BITS: Final = 4.25  # 4 bits, and one scale of 8 bits for 32 numbers
_MXFP4_ROWS: Final = 256  # vLLM's kernels pad a row of an expert to a multiple of it
_SCALE_BITS: Final = 16


@dataclass(frozen=True, slots=True)
class Linear:
    """Equal linear layers: sizes, their number in the whole model, and how GPUs split them.

    Tensor parallelism splits the outputs, or the inputs where `splits_inputs`.
    """

    inputs: int
    outputs: int
    number: int
    splits_inputs: bool = False
    is_expert: bool = False

    @property
    def weights(self) -> int:
        """Parameters of all of them."""
        return self.inputs * self.outputs * self.number


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a checkpoint was quantized: bits per parameter, and the share that padding adds."""

    bits: float
    only_experts: bool = False
    padding: float = 0.0


@dataclass(frozen=True, slots=True)
class Weights:
    """The linear layers of a decoder, and the parameters that no method quantizes.

    `stored` says how a checkpoint is quantized ahead of time; None where it is not, or where its
    method is not counted.
    """

    layers: tuple[Linear, ...]
    unquantized: int  # embeddings, output, routers, vision encoder
    stored: "Quantized | None" = None

    def linear(self, *, only_experts: bool = False) -> int:
        """Return the parameters of the linear layers, or of the experts' only."""
        return sum(one.weights for one in self.layers if one.is_expert or not only_experts)

    @property
    def total(self) -> int:
        """All parameters."""
        return self.linear() + self.unquantized

    def stored_bytes(self, plain: float) -> int | None:
        """Return the bytes of a quantized checkpoint, None for another.

        A parameter that is not quantized takes `plain` bytes.
        """
        if self.stored is None:
            return None
        quantized = self.linear(only_experts=self.stored.only_experts)
        return int((self.total - quantized) * plain + quantized * self.stored.bits / 8)

    @property
    def padding_bytes(self) -> int:
        """Bytes that quantized parameters take in memory beyond those in the files."""
        if self.stored is None:
            return 0
        numbers = self.linear(only_experts=self.stored.only_experts)
        return int(numbers * self.stored.bits / 8 * self.stored.padding)


def count_weights(config: Mapping[str, object]) -> Weights | None:
    """Return the weights that `config` describes; None where the family is not counted."""
    body = text_part(config)
    layers = number_of(body, "num_hidden_layers", "n_layer", "num_layers")
    hidden = number_of(body, "hidden_size", "n_embd", "d_model")
    experts = number_of(body, *_EXPERTS)
    family = str(body.get("model_type") or "")
    if layers is None or hidden is None or family in _NOT_COUNTED or has_other_layers(body):
        return None
    if (experts or _is_mixture(body)) and family not in _COUNTED_MIXTURES:
        return None
    attention, mlp = tuple(_attention(body, hidden, layers)), tuple(_mlp(body, hidden, layers))
    if not attention or not mlp:
        return None
    vocabulary = number_of(body, "vocab_size") or 0
    is_shared = body.get("tie_word_embeddings", family in _TIED) or _has_no_output(config)
    tables = 1 if is_shared else 2
    if family in _LEARNED:
        vocabulary += number_of(body, "max_position_embeddings", "n_positions") or 0
    plain = tables * vocabulary * hidden + _routers(body, hidden, layers)
    plain += _vision(config, hidden)
    return Weights((*attention, *mlp), plain, _stored(body))


def _has_no_output(config: Mapping[str, object]) -> bool:
    """Whether the model makes vectors or scores, so that its files may have no output layer."""
    named, family = config.get("architectures"), config.get("model_type")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return family in ENCODERS or (is_of_transformers(family) and name.endswith(_WITHOUT_OUTPUT))


def _is_mixture(body: Mapping[str, object]) -> bool:
    """Whether there are experts under a name that is not counted; a dense model may say 0 or 1."""
    return any(
        "expert" in name and isinstance(number, int) and number > 1 for name, number in body.items()
    )


def _attention(body: Mapping[str, object], hidden: int, layers: int) -> Iterator[Linear]:
    """Yield the Q, K, V and output projections; none where their sizes are not given."""
    heads = number_of(body, "num_attention_heads", "n_head", "num_heads")
    if heads is None:
        return
    if number_of(body, "kv_lora_rank"):
        yield from _latent_attention(body, hidden, layers, heads)
        return
    size = number_of(body, "head_dim") or hidden // heads
    kv_heads = number_of(body, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    yield Linear(hidden, heads * size, layers)
    yield Linear(hidden, kv_heads * size, 2 * layers)
    yield Linear(heads * size, hidden, layers, splits_inputs=True)


def _latent_attention(
    body: Mapping[str, object], hidden: int, layers: int, heads: int
) -> Iterator[Linear]:
    """Yield the projections of latent attention (DeepSeek's MLA)."""
    rank, rope = number_of(body, "kv_lora_rank") or 0, number_of(body, "qk_rope_head_dim") or 0
    plain = number_of(body, "qk_nope_head_dim") or 0
    value = number_of(body, "v_head_dim") or hidden // heads
    queries = number_of(body, "q_lora_rank")
    if queries:
        yield Linear(hidden, queries, layers)
    yield Linear(queries or hidden, heads * (plain + rope), layers)
    yield Linear(hidden, rank + rope, layers)
    yield Linear(rank, heads * (plain + value), layers)
    yield Linear(heads * value, hidden, layers, splits_inputs=True)


def _mlp(body: Mapping[str, object], hidden: int, layers: int) -> Iterator[Linear]:
    """Yield dense MLPs, experts and shared experts; none where their width is not given."""
    intermediate = number_of(body, "intermediate_size", "n_inner", "ffn_dim")
    sparse = _sparse_layers(body, layers)
    up_projections = 1 if body.get("model_type") in _WITHOUT_GATE else 2
    if intermediate is None:
        return
    if sparse < layers:
        yield from _pair(hidden, intermediate, layers - sparse, up_projections)
    experts = number_of(body, *_EXPERTS)
    if not experts or not sparse:
        return
    width = number_of(body, "moe_intermediate_size") or intermediate
    shared = number_of(body, "shared_expert_intermediate_size") or width * (
        number_of(body, "n_shared_experts") or 0
    )
    yield from _pair(hidden, width, sparse * experts, up_projections, is_expert=True)
    if shared:
        yield from _pair(hidden, shared, sparse, up_projections)


def _pair(
    hidden: int, intermediate: int, number: int, up_projections: int, *, is_expert: bool = False
) -> Iterator[Linear]:
    """Yield the up projections (two with a gate) and the down projection of an MLP."""
    yield Linear(hidden, intermediate, up_projections * number, is_expert=is_expert)
    yield Linear(intermediate, hidden, number, splits_inputs=True, is_expert=is_expert)


def _sparse_layers(body: Mapping[str, object], layers: int) -> int:
    """Return the number of layers with experts: all but the first dense ones, or every n-th."""
    if not number_of(body, *_EXPERTS):
        return 0
    if (step := number_of(body, "decoder_sparse_step", "moe_layer_freq")) and step > 1:
        return layers // step
    named = body.get("mlp_only_layers")
    dense = len(named) if isinstance(named, list) else 0
    return max(0, layers - dense - (number_of(body, "first_k_dense_replace") or 0))


def _routers(body: Mapping[str, object], hidden: int, layers: int) -> int:
    """Return the parameters of the routers, which choose experts."""
    return (number_of(body, *_EXPERTS) or 0) * hidden * _sparse_layers(body, layers)


def _vision(config: Mapping[str, object], outputs: int) -> int:
    """Return the parameters of the vision encoder and its projector; 0 without one."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return 0
    width = number_of(vision, "embed_dim", "hidden_size") or 0
    intermediate = number_of(vision, "intermediate_size") or width * (
        number_of(vision, "mlp_ratio") or 4
    )
    layers = number_of(vision, "num_hidden_layers", "depth") or 0
    kind = str(vision.get("model_type") or config.get("model_type"))
    matrices = 3 if kind in _GATED_VISION else 2
    blocks = layers * (4 * width * width + matrices * width * intermediate)
    if kind.startswith("qwen"):
        return blocks + _mergers(vision, width)
    return blocks + (outputs * (width + outputs) if "projector_hidden_act" in config else 0)


def _mergers(vision: Mapping[str, object], width: int) -> int:
    """Return the parameters of Qwen's mergers, which make one token of several patches."""
    merged = width * (number_of(vision, "spatial_merge_size") or 0) ** 2
    outputs = number_of(vision, "out_hidden_size", "hidden_size") or 0
    deeper = vision.get("deepstack_visual_indexes")
    number = 1 + (len(deeper) if isinstance(deeper, list) else 0)
    return number * (merged * merged + merged * outputs)


def _stored(body: Mapping[str, object]) -> Quantized | None:
    """Return how the checkpoint is quantized; None where its method is not counted."""
    quantization = body.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method = str(quantization.get("quant_method") or "").lower()
    if method == "mxfp4":
        intermediate = number_of(body, "intermediate_size") or 1
        padded = -(-intermediate // _MXFP4_ROWS) * _MXFP4_ROWS
        return Quantized(_MXFP4_BITS, only_experts=True, padding=padded / intermediate - 1)
    bits: float | None = 8.0 if method == "fp8" else None
    if method in ("awq", "gptq"):
        bits = _grouped_bits(quantization, number_of(quantization, "bits", "w_bit"))
    if method == "compressed-tensors":
        bits = _compressed_bits(quantization)
    return None if bits is None else Quantized(bits)


def _grouped_bits(scheme: Mapping[str, object], bits: int | None) -> float | None:
    """Return the bits per parameter with the scale and the zero point of each group."""
    size = number_of(scheme, "group_size", "q_group_size")
    return None if bits is None else bits + ((_SCALE_BITS + bits) / size if size else 0.0)


def _compressed_bits(quantization: Mapping[str, object]) -> float | None:
    """Return the bits per parameter of the first group, in practice every linear layer."""
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    scheme = first.get("weights") if isinstance(first, dict) else None
    if not isinstance(scheme, dict):
        return None
    return _grouped_bits(scheme, number_of(scheme, "num_bits"))
