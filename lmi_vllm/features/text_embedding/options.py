"""Options of LMI's text embedding, and the engine arguments that they become.

LMI reads them without the prefix `option.`: they are arguments of the translator that stands
between the request and its Rust, OnnxRuntime or PyTorch engine.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import FILE, computes, no_effect, option, ours, refuses, warns
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import FeatureSettings, ServerSettings, Settings
from lmi_vllm.config.value_rules import EMBEDDING_ENGINES
from lmi_vllm.messages import DEFAULT_ORIGIN
from lmi_vllm.sources.table import Sources
from lmi_vllm.translate.draft import ArgumentDraft
from lmi_vllm.translate.rules import served_task

# LMI's ways to pool, in the words of newer and older releases, as vLLM's.
_POOLING: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cls": "CLS",
        "cls_token": "CLS",
        "mean": "MEAN",
        "mean_tokens": "MEAN",
        "lasttoken": "LAST",
        "last_token": "LAST",
    }
)
_ZOO: Final = "djl://"  # its models of texts are converted for one of these engines
_TOKENIZED: Final = "vLLM makes the model's inputs"


def unread(text: str) -> str | None:
    """Return a field for an argument of the translator that has no meaning on vLLM."""
    return option(parse.any_text, no_effect(text), written=(FILE,))


def switch(text: str, note: str = "") -> bool | None:
    """Return a field for a part of the translator that vLLM lacks: false is fine, true is not."""
    effect = refuses(text, quiet_for=(False,))
    return option(parse.boolean, effect, written=(FILE,), note=note)


class TextEmbeddingSettings(FeatureSettings):
    """How the translator pools, ranks and cuts texts."""

    section: ClassVar[str] = "Text embedding"

    # fmt: off
    pooling: str | None = option(parse.plain_text, computes("pooler_config"),
        aliases=("option.pooling",), written=(FILE,), values="cls, mean, lasttoken",
        note="How a text's tokens become one vector. Unset means as the model's files say.")
    reranking: bool = option(parse.boolean, computes("runner", "convert"), default=False,
        aliases=("option.reranking",), written=(FILE,),
        note="true: a cross-encoder, which scores pairs of texts.")
    sigmoid: bool = option(parse.boolean, ours(), default=True, aliases=("option.sigmoid",),
        written=(FILE,), note="false: scores of pairs are the model's own, not between 0 and 1.")
    truncation: str | None = option(parse.any_text, ours(), aliases=("option.truncation",),
        written=(FILE,), values="true, false, LONGEST_FIRST, DO_NOT_TRUNCATE",
        note="true cuts `inputs` and pairs that are longer than maxLength, or than the model. "
        "Otherwise they are refused. vLLM's own routes take `truncate_prompt_tokens`.")
    max_length: int | None = option(parse.positive_int, ours(), name="maxLength",
        aliases=("option.maxLength",), written=(FILE,), values="tokens",
        note="Where truncation cuts a text.")
    include_token_types: str | None = option(parse.any_text,
        warns("the model gets token types wherever its tokenizer makes them",
              quiet_for=("true", "True", "TRUE")),
        name="includeTokenTypes", aliases=("option.includeTokenTypes",), written=(FILE,))
    sparse: bool | None = switch("vLLM makes no sparse vectors here; leave it out")
    dense: str | None = unread("vLLM reads the dense layer that the model's modules.json names")
    dense_activation: str | None = option(parse.any_text,
        no_effect("vLLM reads the dense layer that the model's modules.json names"),
        name="denseActivation", written=(FILE,))
    layer_norm: str | None = option(parse.any_text,
        refuses("vLLM puts no normalisation layer behind the model; leave it out"),
        name="layerNorm", written=(FILE,))
    padding: str | None = unread(_TOKENIZED)
    pad_to_multiple_of: str | None = option(parse.any_text, no_effect(_TOKENIZED),
        name="padToMultipleOf", written=(FILE,))
    int32: str | None = unread(_TOKENIZED)
    batchifier: str | None = unread("vLLM batches by itself")
    # fmt: on

    def check(self, server: ServerSettings, sources: Sources, fail: Callable[[str], None]) -> None:
        """Report a way to pool that vLLM does not have."""
        setting = self.details.pooling
        if setting.is_set and self.pooling not in _POOLING:
            fail(f"{setting.stated} is not possible: vLLM pools by cls, mean or lasttoken")

    @property
    def longest(self) -> int | None:
        """The tokens at which a text is cut, -1 for the model's length; None: it is not cut."""
        if (self.truncation or "false").lower() in ("false", "do_not_truncate"):
            return None
        return self.max_length or -1


def is_translated(settings: Settings) -> bool:
    """Whether LMI had a translator before the model: by its engine, or as a model of DJL's zoo."""
    engine = settings.server.details.engine
    named = settings.model.model_id or settings.server.load_models
    is_of_zoo = _ZOO in named and not engine.is_set
    return is_of_zoo or settings.server.engine in EMBEDDING_ENGINES


def configure(draft: ArgumentDraft) -> None:
    """Put how the model pools, and the task of a model that ranks; explicit arguments win."""
    asked = draft.settings.feature(TextEmbeddingSettings)
    explicit = draft.settings.model.details
    if is_translated(draft.settings) and not (explicit.task.is_set or explicit.runner.is_set):
        draft.put("runner", "pooling", DEFAULT_ORIGIN)
    if asked.reranking:
        _rank(draft, asked)
    else:
        _pool(draft, asked)
    for setting, reason in _unused(draft, asked):
        if setting.is_set:
            draft.warn(f"{setting.label} has no effect{reason}", setting)


def _unused(draft: ArgumentDraft, asked: TextEmbeddingSettings) -> Iterator[tuple[Setting, str]]:
    """Yield what has no effect for the model's task, as far as that is known before it is loaded.

    `normalize=false` holds for whatever makes no vectors.
    """
    said, normalize = asked.details, draft.settings.model.details.normalize
    if asked.longest is None:
        yield said.max_length, " without truncation=true"
    if draft.values.get("runner") == "generate":
        for setting in (said.pooling, *_if_on(normalize), said.sigmoid, said.truncation):
            yield setting, ": the model is to generate text"
    elif draft.values.get("convert") == "classify":
        reason = " on a model that ranks or classifies"
        yield said.pooling, f"{reason}: it pools as its own files say"
        for setting in _if_on(normalize):
            yield setting, f"{reason}: it makes no vectors"
    elif draft.values.get("convert") == "embed":
        yield said.sigmoid, " on a model that embeds: it makes no scores"


def _if_on(switch: Setting) -> tuple[Setting, ...]:
    return (switch,) if switch.value is True else ()


def _rank(draft: ArgumentDraft, asked: TextEmbeddingSettings) -> None:
    """Have the model score pairs, whatever option.task says: LMI looks at `reranking` first."""
    origin, explicit = asked.details.reranking.origin, draft.settings.model.details
    if not explicit.runner.is_set:
        draft.put("runner", "pooling", origin)
    if not explicit.convert.is_set:
        draft.put("convert", "classify", origin)


def _pool(draft: ArgumentDraft, asked: TextEmbeddingSettings) -> None:
    """Put the pooling and the normalisation, which /v1/embeddings follows, too."""
    if draft.values.get("convert") == "classify":
        return
    pooling, normalize = asked.details.pooling, draft.settings.model.details.normalize
    values: dict[str, object] = {}
    if normalize.is_set and served_task(draft.values) == "embed":
        values["use_activation"] = normalize.value
    if (found := _POOLING.get(asked.pooling or "")) is not None:
        values["pooling_type"] = found
    explicit = draft.values.get("pooler_config")
    if values and isinstance(explicit, dict):
        label = draft.label("pooler_config")
        for setting, field, scope in (
            (pooling, "pooling_type", ""),
            (normalize, "use_activation", " outside `inputs`"),
        ):
            if field in values and explicit.get(field, values[field]) != values[field]:
                draft.warn(f"{setting.label} has no effect{scope}: {label} is set", setting)
        values |= explicit
    if values:
        origin = (pooling if pooling.is_set else normalize).origin
        draft.put("pooler_config", values, draft.origins.get("pooler_config", origin))
