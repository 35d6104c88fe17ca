"""Requests to models that embed, classify or rank; pairs and vectors as on LMI's Rust engine."""

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import PayloadError
from lmi_vllm.features.text_embedding.options import TextEmbeddingSettings, is_translated
from lmi_vllm.features.text_embedding.pooling import (
    parse_pooling_request,
    pooling_parameters,
    vectors_reply,
)
from lmi_vllm.inference.context import ModelSteps, RequestContext
from lmi_vllm.inference.pipeline import ask_hooked
from lmi_vllm.inference.request.parameters import UnreadNames
from lmi_vllm.inference.response.openai_events import lmi_reply
from lmi_vllm.messages import GENERATE, OpenAIReply, Reply
from lmi_vllm.server.context import ModelContext

_SUCCESS: Final = 200
_JSON: Final = "application/json"
# The names of a pair's two texts; the first that are both there count.
_PAIR_NAMES: Final = (("text", "text_pair"), ("key", "value"))


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of texts that a request has scored; a list is answered with a list."""

    firsts: list[str]
    seconds: list[str]
    is_list: bool


@contextlib.asynccontextmanager
async def answering_texts(model: ModelContext) -> AsyncIterator[None]:
    """Answer requests to a model that does not generate."""
    TextStep(model.settings).add_to(model.steps)
    yield


class TextStep:
    """Lets vLLM embed, classify or rank a payload; with LMI's other engines, in their form."""

    def __init__(self, settings: Settings) -> None:
        self._asked = settings.feature(TextEmbeddingSettings)
        self._is_translated = is_translated(settings)

    def add_to(self, steps: ModelSteps) -> None:
        """Answer the requests that these steps are for."""
        steps.decoders.append(undecoded)
        steps.answers.append(self.answer)

    async def answer(self, context: RequestContext, payload: Mapping[str, Any]) -> Reply | None:
        """Return scores of pairs, or what the model makes of the payload; None where it generates.

        Raises:
            PayloadError: one text of a pair is missing, or a value cannot be embedded.
            UnknownAdapterError: `model` names what is not there.
        """
        task = context.runtime.profile.task
        if task == GENERATE:
            return None
        pairs = read_pairs(payload) if task == "classify" else None
        if pairs is not None or "inputs" in payload:
            context.check_model(payload)
        if pairs is None:
            return await self._pooled(context, payload)
        return await self._scored(context, payload, pairs)

    def _longest(self, context: RequestContext) -> int | None:
        """Return how many tokens are kept: vLLM refuses more than the model takes."""
        longest = self._asked.longest
        return None if longest is None else min(longest, context.runtime.engine.max_model_len)

    async def _scored(
        self, context: RequestContext, payload: Mapping[str, Any], pairs: Pairs
    ) -> Reply:
        body: dict[str, Any] = {
            "text_1": pairs.firsts,
            "text_2": pairs.seconds,
            "use_activation": False,  # LMI's is the sigmoid, whatever the model's config says
        }
        if (longest := self._longest(context)) is not None:
            body["truncate_prompt_tokens"] = longest
        body |= _pair_parameters(payload, context.runtime.unread_names)

        def reply(answer: OpenAIReply) -> Reply:
            return scores_reply(answer, is_list=pairs.is_list, is_probability=self._asked.sigmoid)

        return await ask_hooked(context, "score", payload, body, reply)

    async def _pooled(self, context: RequestContext, payload: Mapping[str, Any]) -> Reply:
        runtime = context.runtime
        is_adapter = runtime.adapters.__contains__
        request = parse_pooling_request(payload, runtime.profile, is_adapter, runtime.unread_names)
        body = request.body
        if "inputs" in payload and (longest := self._longest(context)) is not None:
            body = {"truncate_prompt_tokens": longest, **body}
        reply: Callable[[OpenAIReply], Reply] = lmi_reply
        if request.is_vectors:
            is_bare = self._is_translated and isinstance(payload.get("inputs"), str)
            reply = vector_reply if is_bare else vectors_reply
        return await ask_hooked(context, request.kind, payload, body, reply)


def undecoded(context: RequestContext) -> dict[str, Any] | None:
    """Return a list of texts or pairs as `inputs`; None for every other body."""
    is_list = context.call.body.lstrip().startswith(b"[")
    if context.runtime.profile.task == GENERATE or not is_list:
        return None
    try:
        return {"inputs": orjson.loads(context.call.body)}
    except orjson.JSONDecodeError:
        return None


def read_pairs(payload: Mapping[str, Any]) -> Pairs | None:
    """Return the pairs that a payload, or its `inputs`, holds; None where there is none.

    A pair is `text` with `text_pair`, or `key` with `value`; `query` with `texts` are several.

    Raises:
        PayloadError: one text of a pair is missing, or a value is not text.
    """
    given = payload.get("inputs", payload)
    if isinstance(given, dict):
        if "texts" in given:
            texts = given["texts"] if isinstance(given["texts"], list) else [None]
            return _checked([(given.get("query"), text) for text in texts], is_list=True)
        return _checked([_pair(given)], is_list=False) if _is_pair(given) else None
    if not isinstance(given, list) or not any(isinstance(item, dict) for item in given):
        return None
    return _checked([_pair(item) for item in given], is_list=True)


def _pair_parameters(payload: Mapping[str, Any], unread: UnreadNames) -> dict[str, Any]:
    """Return the fields that the parameters beside pairs become.

    Raises:
        PayloadError: one of them, or `stream`, means nothing for scores.
    """
    if payload.get("stream"):
        raise PayloadError("stream: scores of pairs are not streamed")
    given = payload.get("parameters")
    for name in ("normalize", "dimensions"):
        if isinstance(given, dict) and name in given:
            raise PayloadError(f"parameters.{name}: pairs have scores, not vectors")
    return pooling_parameters(given, unread)


def _is_pair(given: Mapping[str, Any]) -> bool:
    return any(name in given for names in _PAIR_NAMES for name in names)


def _pair(given: object) -> tuple[object, object]:
    if isinstance(given, dict):
        for first, second in _PAIR_NAMES:
            if first in given and second in given:
                return given[first], given[second]
    return None, None


def _checked(pairs: list[tuple[object, object]], *, is_list: bool) -> Pairs:
    firsts, seconds = zip(*pairs, strict=True) if pairs else ((), ())
    texts = [text for text in (*firsts, *seconds) if isinstance(text, str)]
    if not pairs or len(texts) < 2 * len(pairs):
        raise PayloadError(
            "expected pairs of texts: text with text_pair, key with value, a list of these, or "
            "query with a list of texts"
        )
    return Pairs(texts[: len(pairs)], texts[len(pairs) :], is_list)


def scores_reply(answer: OpenAIReply, *, is_list: bool, is_probability: bool) -> Reply:
    """Return a list with the score of each pair, each in a list of its own, as a tensor has them.

    Raises:
        LmiError: vLLM refused: its error, as the server's error of the same meaning.
    """
    if answer.status != _SUCCESS:
        return lmi_reply(answer)
    items = sorted(orjson.loads(answer.body)["data"], key=lambda item: int(item["index"]))
    scores = [[_sigmoid(item["score"]) if is_probability else item["score"]] for item in items]
    return Reply(_SUCCESS, _JSON, orjson.dumps(scores if is_list else scores[0]) + b"\n")


def _sigmoid(value: float) -> float:
    """Return the sigmoid, computed from the absolute value, so that no exponent is too large."""
    share = math.exp(-abs(value)) / (1 + math.exp(-abs(value)))
    return share if value < 0 else 1 - share


def vector_reply(answer: OpenAIReply) -> Reply:
    """Return the vector of the one text.

    Raises:
        LmiError: vLLM refused: its error, as the server's error of the same meaning.
    """
    reply = vectors_reply(answer)
    [vector] = orjson.loads(reply.body)
    return Reply(_SUCCESS, _JSON, orjson.dumps(vector) + b"\n")
