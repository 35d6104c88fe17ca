"""One architecture: its checkpoint served by a real process, asked four ways, compared."""

import base64
import inspect
import io
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from PIL import Image
from vllm.model_executor.models.registry import ModelRegistry

from integration.client import call
from integration.conftest import ServerProcess, start_server
from integration.matrix.checkpoints import Architecture, Reference, build
from integration.package_copies import torchvision_copy
from lmi_vllm.config.vllm_schema import installed_version
from tests.support.vision_model import picture

PROMPT: Final = "The capital of France is"
QUESTION: Final = "What is the capital of France?"
NEW_TOKENS: Final = 12
START_SECONDS: Final = 240.0
END_OF_TEXT: Final = 1
RELEASE: Final = str(installed_version())
# Log probabilities of 1280 words: kernels differ in the order of their sums, and a number that is
# half-way between two steps of a quantized one is rounded up or down.
LARGEST_DIFFERENCE: Final[Mapping[str, float]] = {"models": 2e-3, "quantization": 5e-2}
DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
OPTIONS: Final[Mapping[str, str]] = {
    "OPTION_DTYPE": "fp32",
    "OPTION_ENFORCE_EAGER": "true",
    "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
    "OPTION_MAX_MODEL_LEN": "512",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was seen of one architecture; `error` is the text that stands in the page."""

    name: str
    title: str
    group: str
    works: bool
    served_as: str  # the class vLLM chose, or that our own engine loaded
    engine: str  # "" is vLLM
    mapping: str  # what we changed, in the words of our log
    reference: str
    tokens: int  # compared, over all four answers
    distinct: int  # different ids among them: 1 is weak evidence
    difference: float | None  # the largest one of log probabilities
    error: str
    remark: str
    options: str
    release: str
    seconds: float


class MismatchError(Exception):
    """An answer that is not Transformers'."""


def run(row: Architecture, folder: Path) -> Outcome:
    """Build, serve, ask and compare `row` below `folder`."""
    began = time.monotonic()
    reference = build(row, folder / row.name)
    texts = {"name": row.name, "title": row.title, "group": row.group, "reference": row.reference}
    given = {**OPTIONS, **row.options}
    if (dtype := given["OPTION_DTYPE"]) in DTYPES:
        reference.model.to(DTYPES[dtype])
    server = serve(row, folder)
    compared = Compared(LARGEST_DIFFERENCE[row.group])
    error = ""
    try:
        url = server.wait_listening()
        if not is_ready(server):
            error = reason_of(server)
        else:
            compare(url, reference, compared, has_own_prompt=row.has_own_prompt)
    except MismatchError as mismatch:
        error = str(mismatch)
    finally:
        server.kill()
    own = _found(server.stderr, r"Transformers engine: (\w+) on ")
    return Outcome(
        **texts,
        works=not error,
        served_as=own or class_of(_found(server.stderr, r"Resolved architecture: (\w+)")),
        engine="transformers" if own else "",
        mapping=_found(server.stderr, r"architecture (\w+ is served as \w+)"),
        tokens=compared.tokens,
        distinct=len(compared.ids),
        difference=compared.difference,
        error=error,
        remark=row.remark,
        options=" ".join(_as_option(*pair) for pair in row.options.items()),
        release=RELEASE,
        seconds=round(time.monotonic() - began, 1),
    )


def serve(
    row: Architecture, folder: Path, more: Mapping[str, str] = MappingProxyType({})
) -> ServerProcess:
    """Start a server over the checkpoint of `row` below `folder`, with `more` options.

    Transformers looks for torchvision once, as it is imported, and few rows need it.
    """
    environ = {**OPTIONS, **row.options, **more, "HF_MODEL_ID": str(folder / row.name)}
    if row.processor:
        paths = (str(torchvision_copy()), os.getcwd())  # noqa: PTH109 (as the environment has it)
        environ["PYTHONPATH"] = os.pathsep.join(paths)
    return start_server(folder, "--port", "0", environ=environ, is_forked=True)


class Compared:
    """How much was compared so far."""

    def __init__(self, largest_difference: float) -> None:
        self._largest_difference = largest_difference
        self.tokens = 0
        self.ids: set[int] = set()
        self.difference: float | None = None

    def equal(self, what: str, expected: list[int], seen: list[int]) -> None:
        """Count the tokens; MismatchError where they are not the same."""
        if _text_only(expected) != _text_only(seen):
            raise MismatchError(f"{what}: Transformers' tokens are {expected}, ours {seen}")
        self.tokens += len(seen)
        self.ids |= set(seen)

    def close(self, expected: list[float], seen: list[float]) -> None:
        """Compare log probabilities; MismatchError where they are apart."""
        pairs = zip(expected, seen, strict=False)
        self.difference = max(abs(one - other) for one, other in pairs)
        if not self.difference < self._largest_difference:
            raise MismatchError(f"log probabilities differ by {self.difference:.1g}")


def compare(
    url: str, reference: Reference, compared: Compared, *, has_own_prompt: bool = False
) -> None:
    """Ask LMI and chat payloads, streamed and not; with an image where the model sees."""
    prompt = torch.tensor([reference.tokenizer(PROMPT)["input_ids"]])
    expected, scores = greedy(reference.model, {"input_ids": prompt})
    details = asked(url, lmi_payload())["details"]["tokens"]
    compared.equal("LMI", expected, [token["id"] for token in details])
    compared.close(scores, [token["log_prob"] for token in details])
    rows = rows_of(url, lmi_payload(stream=True))
    compared.equal("LMI streamed", expected, [row["token"]["id"] for row in rows])
    image = picture(1) if reference.processor is not None else None
    inputs = chat_inputs(reference, image)
    chat = asked(url, chat_payload(image))
    if has_own_prompt:  # vLLM does not ask the chat template
        inputs = {"input_ids": torch.tensor([chat["prompt_token_ids"]])}
    ids = inputs["input_ids"][0].tolist()
    if chat["prompt_token_ids"] != ids:
        raise MismatchError(f"chat: the prompt is {chat['prompt_token_ids']} and not {ids}")
    expected, _ = greedy(reference.model, inputs)
    compared.equal("chat", expected, chat["choices"][0]["token_ids"])
    rows = rows_of(url, chat_payload(image, stream=True))
    choices = [choice for row in rows for choice in row["choices"]]
    ids = [number for choice in choices for number in choice.get("token_ids") or ()]
    compared.equal("chat streamed", expected, ids)
    if image is not None:
        blind, _ = greedy(reference.model, chat_inputs(reference, picture(2)))
        if blind == expected:
            raise MismatchError("chat: another image has the same answer, so nothing is shown")


def chat_inputs(reference: Reference, image: bytes | None) -> Mapping[str, Any]:
    """What Transformers' model takes for the chat payload."""
    if image is None:
        ids = reference.tokenizer.apply_chat_template(
            messages(None), add_generation_prompt=True, return_dict=False
        )
        return {"input_ids": torch.tensor([ids])}
    text = reference.tokenizer.apply_chat_template(
        messages(image), add_generation_prompt=True, tokenize=False
    )
    with Image.open(io.BytesIO(image)) as opened:
        inputs = reference.processor(
            text=text, images=[opened], return_tensors="pt", add_special_tokens=False
        )
    unread = {"token_type_ids"} - set(inspect.signature(reference.model.forward).parameters)
    return {name: value for name, value in inputs.items() if name not in unread}


def messages(image: bytes | None) -> list[dict[str, Any]]:
    """One question, about a picture where there is one."""
    if image is None:
        return [{"role": "user", "content": QUESTION}]
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    shown = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [{"type": "text", "text": QUESTION}, shown]}]


def lmi_payload(*, stream: bool = False) -> dict[str, object]:
    """The `inputs` payload."""
    parameters = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "details": True}
    return {"inputs": PROMPT, "parameters": parameters, "stream": stream}


def chat_payload(image: bytes | None, *, stream: bool = False) -> dict[str, object]:
    """The `messages` payload, answered with token ids."""
    return {"messages": messages(image), "max_tokens": NEW_TOKENS, "temperature": 0,
            "return_token_ids": True, "stream": stream}  # fmt: skip


def asked(url: str, payload: object) -> Any:
    """The one JSON answer."""
    answer = call(url, "/invocations", payload, seconds=120)
    if answer.status != 200:
        raise MismatchError(f"{answer.status}: {answer.body.decode('utf-8', 'replace')}")
    return answer.json()


def rows_of(url: str, payload: object) -> list[Any]:
    """The rows of a stream, of jsonlines or of server-sent events."""
    answer = call(url, "/invocations", payload, seconds=120)
    if answer.status != 200:
        raise MismatchError(f"{answer.status}: {answer.body.decode('utf-8', 'replace')}")
    return list(_json_rows(answer.body.decode("utf-8")))


def _json_rows(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        row = line.removeprefix("data: ").strip()
        if row and row != "[DONE]":
            yield json.loads(row)


def greedy(model: Any, inputs: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Transformers' tokens after the prompt in `inputs` and their log probabilities."""
    prompt = inputs["input_ids"]
    with torch.inference_mode():
        out = model.generate(
            **{"attention_mask": torch.ones_like(prompt)} | dict(inputs),
            do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True,
            output_logits=True, eos_token_id=END_OF_TEXT, pad_token_id=2,
        )  # fmt: skip
    ids = out.sequences[0][-len(out.logits) :].tolist()
    scores = [
        float(torch.log_softmax(logits[0].float(), -1)[number])
        for logits, number in zip(out.logits, ids, strict=True)
    ]
    return ids, scores


def is_ready(server: ServerProcess) -> bool:
    """Whether the server came up; False once it ended."""
    deadline = time.monotonic() + START_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        line: str = server.lines.get(timeout=left)
        server.seen.append(line)
        if line.startswith("Ready on "):
            return True
        if not line:
            return False
    return False


def reason_of(server: ServerProcess) -> str:
    """The server's own last words."""
    lines = [line.strip() for line in server.stderr.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("error:", "Error:", "lmi-vllm:"))]
    return (said or lines or ["nothing was said"])[-1]


def class_of(architecture: str) -> str:
    """The class behind an architecture's name: vLLM lists some under its Transformers backend."""
    entry = ModelRegistry.models.get(architecture)
    return str(getattr(entry, "class_name", "") or architecture)


def save(outcome: Any, folder: Path) -> None:
    """Keep an outcome, of a model or of its adapters, for the page and for a run that goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(outcome), indent=1, ensure_ascii=False) + "\n"
    (folder / f"{outcome.name}.json").write_text(text, encoding="utf-8")


def _as_option(variable: str, value: str) -> str:
    """A variable as a line of serving.properties."""
    return f"{variable.lower().replace('_', '.', 1)}={value}"


def _text_only(ids: list[int]) -> list[int]:
    """`ids` without the end of text, which not every answer shows."""
    return ids[:-1] if ids and ids[-1] == END_OF_TEXT else ids


def _found(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""
