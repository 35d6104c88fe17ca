"""The frozen types that cross packages. No behaviour beyond properties; standard library only."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.errors import Dialect

# LMI's names of levels and Python's.
LOG_LEVELS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "trace": logging.DEBUG,
        "debug": logging.DEBUG,
        "info": logging.INFO,
        "warn": logging.WARNING,
        "error": logging.ERROR,
        "fatal": logging.CRITICAL,
        "off": logging.CRITICAL + 1,
    }
)
# What images in messages may be. The head of these files bounds what is decoded.
SAFE_IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
IMAGE_FORMATS: Final = (
    *SAFE_IMAGE_FORMATS,
    *("AVIF", "DDS", "DIB", "ICNS", "ICO", "JPEG2000", "PCX", "PPM", "PSD", "QOI", "SGI", "TGA"),
    "TIFF",
)
GENERATE: Final = "generate"  # the task of a profile that is not pooling
# vLLM's pooling tasks -> the kind of call for such a model; else `pooling`.
POOLING_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {"embed": "embeddings", "classify": "classify"}
)


class OriginKind(StrEnum):
    """The kinds of places; they decide what a value may mean and which of two counts."""

    DEFAULT = "default"  # nothing was written
    FLAG = "flag"  # of the command line
    PLATFORM = "platform"  # a SageMaker variable that overrides serving.properties
    FILE = "file"  # serving.properties or config.properties, with the line
    HUB = "hub"  # HF_MODEL_ID, HF_REVISION, HF_TASK
    VARIABLE = "variable"  # an environment variable of the setting's own name
    ALIAS = "alias"  # an alias of the setting's variable
    LATE = "late"  # a variable that counts only while the option is set nowhere else
    DERIVED = "derived"  # computed from the model or the machine


@dataclass(frozen=True, slots=True)
class Origin:
    """One place; `str()` is how messages name it."""

    kind: OriginKind
    name: str
    line: int | None = None

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name} line {self.line}"

    @property
    def is_default(self) -> bool:
        """Whether nothing was written."""
        return self.kind is OriginKind.DEFAULT


DEFAULT_ORIGIN: Final = Origin(OriginKind.DEFAULT, "default")


def _number(values: Mapping[str, object], name: str, default: int) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else default


@dataclass(frozen=True, slots=True)
class ModelArtifacts:
    """The served model, and the place of its files.

    `reference` is what the user named (hub id, URL or path). `model` is what the engine gets: a
    local directory, once fetched. `directory` is the LMI model directory (serving.properties,
    model.py, adapters/), which may have no weights; None if there is none.
    """

    name: str
    reference: str
    model: str
    revision: str | None = None
    directory: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether the engine can read the weights without a network."""
        return Path(self.model).is_dir()


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """vLLM keyword arguments by field name, with their JSON types, and the origin of each.

    `architectures` are those of the model's config.json, as far as that was read. `served_length`
    is what an engine before this one has served, in tokens: this one shall not serve less.
    """

    values: Mapping[str, object]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    served_length: int = 0

    def origin_of(self, name: str) -> Origin:
        """The place where argument `name` was written."""
        return self.origins.get(name, DEFAULT_ORIGIN)

    def number(self, name: str, default: int) -> int:
        """Argument `name` as a whole number; `default` if it is unset."""
        return _number(self.values, name, default)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one request's work; each but `max_logprobs` has a setting LMI_<NAME>."""

    max_sequences: int = 16  # of n, best_of, num_beams
    max_stop_strings: int = 64  # of stop strings and bad words
    max_stop_length: int = 1000  # characters of each
    max_logit_bias: int = 1024  # entries; also of stop_token_ids and allowed_token_ids
    max_grammar_size: int = 64 << 10  # bytes of a schema, regular expression or grammar
    grammar_timeout: float = 10.0  # seconds to compile one
    max_logprobs: int = 20  # the engine's argument; -1 is no limit
    max_tokenize_length: int = 512 << 10  # characters or token ids that are only converted
    max_prompt_logprobs: int = 16 << 10  # of all tokens of a request's prompts together


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """What the server fetches for URLs in messages; the settings are LMI_MEDIA_<NAME>."""

    allows_private: bool = False
    max_bytes: int = 64 << 20  # bytes of one image, sound or video
    seconds: float = 30.0  # seconds for one, redirects included
    max_pixels: int = 1 << 26  # pixels of one image; of all images of a request, four times as many
    image_formats: tuple[str, ...] = SAFE_IMAGE_FORMATS


@dataclass(frozen=True, slots=True)
class ServingProfile:
    """The part of the configuration that request handling needs."""

    model_name: str = "model"
    model_reference: str = ""  # what the user named: a hub id, URL or path
    served_names: tuple[str, ...] = ("lmi",)
    task: str = GENERATE  # or a pooling task of vLLM's: "embed", "classify", ...
    output_formatter: str | None = None
    tgi_compat: bool = False
    stream_logprobs: bool = True
    normalize: bool = True
    enable_lora: bool = False
    adapter_slots: int = 0
    job_queue_size: int = 1000
    max_request_size: int = 64 << 20  # bytes
    max_adapter_size: int = 16 << 30  # bytes
    adapter_roots: tuple[Path, ...] = ()  # files of adapters from below them lie below them
    predict_timeout: float = 240.0  # seconds
    chunked_read_timeout: float = 120.0  # seconds
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    tool_parser_plugin: str | None = None  # path
    chat_template: str | None = None  # path or inline Jinja
    chat_template_content_format: str = "auto"
    single_bos: bool = False
    uses_priority: bool = False  # the engine's scheduling_policy is `priority`
    has_token_lane: bool = True
    limits: RequestLimits = field(default_factory=RequestLimits)
    media: MediaPolicy = field(default_factory=MediaPolicy)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One load of one LoRA adapter; `engine_id` is positive and never used again.

    It gets the slot of the pinned load whose id is `replaces`, or ends that one's pin.
    """

    name: str
    path: str
    engine_id: int
    pinned: bool = False
    replaces: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Keep the `width` most probable sequences; `length_penalty` above 1 prefers longer ones."""

    width: int
    length_penalty: float = 1.0


_NUMBERS: Final = frozenset({bool, int, float, type(None)})


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One prompt for the engine.

    `sampling` has vLLM's SamplingParams fields by name. With `apply_model_defaults` the model's own
    generation config sets the other fields; otherwise they have vLLM's neutral values. With `beams`
    the answer is that many sequences, best first, and never streamed.
    """

    request_id: str
    prompt: str
    sampling: Mapping[str, object] = field(default_factory=dict)
    adapter: AdapterRef | None = None
    is_streaming: bool = False
    apply_model_defaults: bool = False
    truncate_prompt_tokens: int | None = None  # keep the last N tokens of the prompt
    priority: int = 0
    needs_token_texts: bool = True
    beams: BeamSearch | None = None
    prompt_ids: tuple[int, ...] = ()  # instead of the text, for an engine without a tokenizer

    @property
    def sampling_key(self) -> tuple[object, ...] | None:
        """All that vLLM's parameters are made of; None if a value is more than a number.

        It has the types, too: 1, 1.0 and true are equal, and mean different things.
        """
        values = self.sampling.values()
        types = tuple(map(type, values))
        if not _NUMBERS.issuperset(types):
            return None
        return (*self.sampling, *values, *types, self.apply_model_defaults, self.is_streaming)

    def number(self, name: str, default: int) -> int:
        """Sampling field `name` as a whole number; `default` where it is unset."""
        value = self.sampling.get(name)
        return value if isinstance(value, int) else default


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a text and the characters it stands for; none for a special token."""

    id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its natural-log probability."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One generated token; the texts of a sequence's tokens together are its text.

    `logprob` is None unless log probabilities were asked for. `top` are the most probable tokens at
    this position, best first, if `logprobs` > 0 was asked for.
    """

    id: int
    text: str
    logprob: float | None = None
    is_special: bool = False
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What one engine step added to sequence `index` of a request.

    In a stream it is a delta, otherwise the whole sequence. `finish_reason` is vLLM's (`stop`,
    `length`, `abort`), and set only in the last chunk of a sequence. `stop_reason` is the stop
    string or token id that ended it; None for the model's own end token.
    """

    index: int
    tokens: tuple[GeneratedToken, ...]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    cumulative_logprob: float | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # without the first token, which has none
    prompt_start: tuple[int, str] | None = None  # that token and its text, beside the others


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """A request for one of vLLM's own OpenAI handlers.

    `body` is the decoded JSON object, and `headers` are by lower-case name.
    `kind` is the handler's route below /v1: `chat/completions`, `completions`, `responses`,
    `embeddings`, `models`, ... For `responses/retrieve` and `responses/cancel` the body has the
    handler's arguments. With `adapter` that load of it answers, even if its name means another by
    then.
    """

    kind: str
    body: Mapping[str, object]
    headers: Mapping[str, str]
    request_id: str
    adapter: AdapterRef | None = None


@dataclass(frozen=True, slots=True)
class OpenAIReply:
    """vLLM's own answer: either `body`, or the SSE events of `stream`, one event per item.

    `response` is the object that `body` was made from, if there is one.
    """

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    stream: AsyncIterator[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    response: object = None


class RouteKind(StrEnum):
    """The effect of a route of the engine's own HTTP application."""

    INFERENCE = "inference"  # answers a request, most often with the engine
    INFORMATION = "information"  # returns information about the server, at once
    MANAGEMENT = "management"  # acts on the server


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """One route of the engine's own HTTP application; `path` may have `{parameters}`."""

    path: str
    methods: frozenset[str]
    kind: RouteKind
    dialect: Dialect
    needs_engine: bool = True  # False: it splits prompts alone, also while the engine sleeps


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request for the engine's own HTTP application, unchanged.

    `headers` are names and values in their order. `request_id` replaces the header of that name; if
    it is empty, the request's own header counts.
    """

    method: str
    path: str
    query_string: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    request_id: str
    adapter: AdapterRef | None = None  # that load of it answers, whatever `model` is
    model: str = ""  # the base model's name, where the body's `model` is an adapter's

    @property
    def content_type(self) -> str:
        """The body's type in the headers; empty without one."""
        values = (value for name, value in self.headers if name.lower() == b"content-type")
        return next(values, b"").decode("latin-1")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer without HTTP: `stream` yields framed rows, else `body` is the whole answer."""

    status: int
    content_type: str
    body: bytes = b""
    stream: AsyncIterator[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TgiRoute:
    """One of TGI's own routes: whether it streams (None: the body decides) and wraps its answer."""

    is_streaming: bool | None
    is_wrapped: bool


@dataclass(frozen=True, slots=True)
class InferenceCall:
    """An inference request without HTTP.

    `properties` are headers and SageMaker custom attributes by lower-case name, and `query` the
    query parameters. `tgi_route` is set for TGI's own routes.
    """

    body: bytes
    content_type: str = ""
    accept: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    request_id: str = ""
    tgi_route: TgiRoute | None = None


@dataclass(frozen=True, slots=True)
class Framing:
    """How one row becomes bytes; `is_streamed` if it frames rows of a stream."""

    content_type: str
    before: bytes
    after: bytes
    is_streamed: bool = True


_JSON: Final = Framing("application/json", before=b"", after=b"\n", is_streamed=False)
_JSON_LINES: Final = Framing("application/jsonlines", before=b"", after=b"\n")
# By the name of the output formatter that chooses it.
FRAMINGS: Final[Mapping[str, Framing]] = MappingProxyType(
    {
        "json": _JSON,
        "jsonlines": _JSON_LINES,
        "sse": Framing("text/event-stream", before=b"data: ", after=b"\n\n"),
        "3p": _JSON,
        "3p_stream": _JSON_LINES,
    }
)
# Formatters whose answers LMI meters for third parties' endpoints.
METERED: Final = ("3p", "3p_stream")
# Accept headers that choose the framing of a stream; any other has no effect.
ACCEPTED_FRAMINGS: Final[Mapping[str, Framing]] = MappingProxyType(
    {framing.content_type: framing for framing in FRAMINGS.values() if framing.is_streamed}
)
