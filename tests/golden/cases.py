"""Read the golden files: requests, what the engine does, and the exact answer.

Each file holds cases by name. `script` is what the scripted engine yields: a chunk, or an error of
ours by class name. `openai_error` is how vLLM's stream fails after its first event.
`body` of an answer is the exact text on the wire.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lmi_vllm.errors
from lmi_vllm.features.scripted.engine import Fail, Step
from lmi_vllm.messages import (
    GeneratedToken,
    GenerationChunk,
    ServingProfile,
    TgiRoute,
    TokenLogprob,
)

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Golden:
    """One request and its exact answer."""

    name: str
    method: str
    path: str
    headers: dict[str, str]
    sent: bytes
    profile: ServingProfile
    script: tuple[Step, ...]
    status: int
    content_type: str
    body: bytes
    openai_error: dict[str, Any]
    tgi_route: TgiRoute | None = None  # which of TGI's own routes it asks

    @property
    def payload(self) -> dict[str, Any]:
        """The request as the payload parser gets it."""
        payload: dict[str, Any] = json.loads(self.sent)
        return payload


def load_golden(
    folder: Path = FOLDER, tgi_routes: Mapping[str, TgiRoute] | None = None
) -> list[Golden]:
    """Return the cases of all files of a folder; `tgi_routes` are those that there are, by path."""
    cases = [
        _case(f"{path.stem}: {name}", raw)
        for path in sorted(folder.glob("*.json"))
        for name, raw in json.loads(path.read_text()).items()
    ]
    return [replace(case, tgi_route=(tgi_routes or {}).get(case.path)) for case in cases]


def _case(name: str, raw: dict[str, Any]) -> Golden:
    request, response = raw["request"], raw["response"]
    sent = request.get("body", "")
    return Golden(
        name=name,
        method=request.get("method", "POST"),
        path=request.get("path", "/invocations"),
        headers={"Content-Type": "application/json", **request.get("headers", {})},
        sent=(sent if isinstance(sent, str) else json.dumps(sent)).encode(),
        profile=ServingProfile(**{"model_name": "demo", **raw.get("profile", {})}),
        script=tuple(_step(step) for step in raw.get("script", [])),
        status=response.get("status", 200),
        content_type=response["content_type"],
        body=response["body"].encode(),
        openai_error=raw.get("openai_error", {}),
    )


def _step(raw: dict[str, Any]) -> Step:
    if "error" in raw:
        return Fail(getattr(lmi_vllm.errors, raw["error"])(*raw.get("arguments", [])))
    tokens = tuple(_token(token) for token in raw.get("tokens", []))
    return GenerationChunk(
        index=raw.get("index", 0),
        tokens=tokens,
        text=raw.get("text", "".join(token.text for token in tokens)),
        finish_reason=raw.get("finish_reason"),
        stop_reason=raw.get("stop_reason"),
        prompt_tokens=raw.get("prompt_tokens", 0),
        cumulative_logprob=raw.get("cumulative_logprob"),
        prompt_logprobs=tuple(TokenLogprob(*item) for item in raw.get("prompt_logprobs", [])),
    )


def _token(raw: dict[str, Any]) -> GeneratedToken:
    top = tuple(TokenLogprob(*item) for item in raw.get("top", []))
    return GeneratedToken(
        raw["id"], raw["text"], raw.get("logprob"), raw.get("special", False), top
    )
