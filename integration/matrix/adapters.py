"""Adapters, one architecture and one target module after the other, compared with merged weights.

The reference is Transformers' own model with B x A added to its weights. Where a family's tensors
are others than the reference's (fused, permuted, renamed), the places are found by writing the
reference once with each number's index in its place.
"""

import copy
import json
import re
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from integration.client import call
from integration.matrix.checkpoints import Architecture, Reference, build, write
from integration.matrix.renamed import same_heads, unit_head, with_alibi_and_unit_head
from integration.matrix.run import (
    PROMPT,
    RELEASE,
    Compared,
    MismatchError,
    asked,
    greedy,
    is_ready,
    lmi_payload,
    reason_of,
    serve,
)

RANK: Final = 8
ALPHA: Final = 16
SCALE: Final = ALPHA / RANK
STRENGTHS: Final = (0.5, 1.0, 2.0, 4.0)  # of B x A, times the size of the weights it is added to
OPTIONS: Final = {
    "OPTION_ENABLE_LORA": "true",
    "OPTION_MAX_LORAS": "2",
    "OPTION_MAX_LORA_RANK": str(RANK),
}
REFUSED: Final = 424
_SEEING: Final = re.compile(r"(^|\.)(vision|visual|multi_modal|eyes|connector)")


@dataclass(slots=True)
class Outcome:
    """What was seen of one architecture's adapters; target modules as their family names them."""

    name: str
    title: str
    release: str
    error: str = ""  # why the server does not start with adapters
    works: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # target: what was said
    wrong: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """One weight of the checkpoint that an adapter can change."""

    module: str
    places: torch.Tensor  # of its numbers, in all of the reference's
    is_turned: bool  # stored as (in, out)
    is_embedding: bool

    @property
    def kind(self) -> str:
        """What all layers have in common of the name."""
        parts = [part for part in self.module.split(".") if not part.isdigit()]
        kind = ".".join(parts[-2:]) if len(parts) != len(self.module.split(".")) else parts[-1]
        return f"{kind} (vision)" if _SEEING.search(self.module) else kind


class Merging:
    """The reference, its weights in one row, and where the family's tensors have them."""

    def __init__(self, row: Architecture, reference: Reference) -> None:
        self._row, self._reference = row, reference
        self._model = reference.model
        parameters = [value.detach().flatten() for value in self._model.parameters()]
        self._numbers = torch.cat(parameters).clone()
        self._starts = list(accumulate((value.numel() for value in parameters), initial=0))
        self._names = [name for name, _ in self._model.named_parameters()]
        self._ids = reference.tokenizer(PROMPT)["input_ids"]
        self.base = self._answer()

    def targets(self) -> dict[str, list[Target]]:
        """Return what can be adapted, by kind."""
        found: dict[str, list[Target]] = {}
        for name, places in _places(self._row, self._model).items():
            if target := self._target(name, places):
                found.setdefault(target.kind, []).append(target)
        return found

    def size(self, target: Target) -> float:
        """Return the root mean square of a weight."""
        return float(self._numbers[target.places].square().mean().sqrt())

    def answer(self, changes: Iterable[tuple[Target, torch.Tensor]]) -> tuple[list[int], Any]:
        """Return tokens and log probabilities with these products added; the base is as before."""
        numbers = self._numbers.clone()
        for target, product in changes:
            is_stored_so = not (target.is_turned or target.is_embedding)
            numbers[target.places] += product if is_stored_so else product.T
        head = self._model.get_output_embeddings()
        tied = head is not None and head.weight is self._model.get_input_embeddings().weight
        kept = head.weight.detach().clone() if tied else None
        try:
            self._set(numbers)
            if tied:  # an adapter of the embeddings leaves the head alone
                head.weight = torch.nn.Parameter(kept)
            return self._answer()
        finally:
            if tied:
                head.weight = self._model.get_input_embeddings().weight
            self._set(self._numbers)

    def _answer(self) -> tuple[list[int], list[float]]:
        return greedy(self._model, {"input_ids": torch.tensor([self._ids])})

    def _set(self, numbers: torch.Tensor) -> None:
        values = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, start in zip(self._names, self._starts, strict=False):
                value = values[name]
                value.copy_(numbers[start : start + value.numel()].view_as(value))
            if self._row.prepared is same_heads:
                same_heads(self._model)

    def _target(self, name: str, places: torch.Tensor) -> Target | None:
        whole = places.long()
        if places.dim() != 2 or not name.endswith(".weight") or not torch.equal(whole, places):
            return None
        first = int(whole[0, 0])
        index = max(i for i, start in enumerate(self._starts[:-1]) if start <= first)
        owner = self._model.get_submodule(self._names[index].rpartition(".")[0])
        is_embedding = isinstance(owner, torch.nn.Embedding)
        if is_embedding and owner is not self._model.get_input_embeddings():
            return None
        is_turned = type(owner).__name__ == "Conv1D"
        return Target(name.removesuffix(".weight"), whole, is_turned, is_embedding)


def _places(row: Architecture, model: Any) -> Mapping[str, torch.Tensor]:
    """The family's tensors, each number being its index among the reference's."""
    numbered, count = copy.deepcopy(model).double(), 0
    with torch.no_grad():
        for value in numbered.parameters():
            value.copy_(torch.arange(count, count + value.numel()).view_as(value))
            count += value.numel()
    with tempfile.TemporaryDirectory() as folder:
        write(row, numbered, Path(folder))
        found = load_file(Path(folder) / "model.safetensors")
    if row.prepared in (unit_head, with_alibi_and_unit_head):  # each row is its own, times a number
        found["lm_head.weight"] = numbered.lm_head.weight.detach()
    return found


def run(row: Architecture, folder: Path) -> Outcome:
    """Build and serve `row` with adapters below `folder`; compare each target module's."""
    began = time.monotonic()
    outcome = Outcome(row.name, row.title, RELEASE)
    reference = build(row, folder / row.name)
    server = serve(row, folder, OPTIONS)
    try:
        url = server.wait_listening()
        if is_ready(server):
            _compare(url, folder / "adapters", Merging(row, reference), outcome)
        else:
            outcome.error = reason_of(server)
    finally:
        server.kill()
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _compare(url: str, folder: Path, merging: Merging, outcome: Outcome) -> None:
    """Each kind alone, then all that work at once."""
    _same(merging.base, asked(url, lmi_payload()))
    kinds = merging.targets()
    for kind, targets in kinds.items():
        _note(outcome, kind, _try(url, folder, merging, targets))
    together = [target for kind in outcome.works for target in kinds[kind]]
    if len(outcome.works) > 1 and (said := _try(url, folder, merging, together)):
        outcome.wrong["all together"] = said[1]


def _note(outcome: Outcome, kind: str, said: tuple[bool, str] | None) -> None:
    if said is None:
        outcome.works.append(kind)
    else:
        is_refused, text = said
        (outcome.refused if is_refused else outcome.wrong)[kind] = text


def _try(
    url: str, folder: Path, merging: Merging, targets: list[Target]
) -> tuple[bool, str] | None:
    """Whether an adapter of these was refused, and what was said; None where it is right."""
    place, expected = adapter(folder, merging, targets)
    answer = call(url, f"/adapters?name=a&src={place}", method="POST", seconds=120)
    if answer.status != 200:
        said = answer.json().get("message", "").replace(str(place), "<path>")
        return answer.status == REFUSED, f"{answer.status}: {said}"
    try:
        if expected[0] == merging.base[0]:
            return False, "taken, and nothing is shown: the answer is the base's"
        _same(expected, asked(url, lmi_payload() | {"adapters": "a"}))
        _same(merging.base, asked(url, lmi_payload()))
    except MismatchError as mismatch:
        return False, str(mismatch)
    finally:
        call(url, "/adapters/a", method="DELETE", seconds=120)
    return None


def _same(expected: tuple[list[int], list[float]], answer: Any) -> None:
    compared, tokens = Compared(2e-3), answer["details"]["tokens"]
    compared.equal("the answer", expected[0], [token["id"] for token in tokens])
    compared.close(expected[1], [token["log_prob"] for token in tokens])


def adapter(
    folder: Path, merging: Merging, targets: list[Target]
) -> tuple[Path, tuple[list[int], list[float]]]:
    """Write an adapter of these below `folder`, and return the answer that it should change."""
    names = ",".join(target.module for target in targets)
    place = folder / f"{zlib.crc32(names.encode()):08x}"
    place.mkdir(parents=True, exist_ok=True)
    for strength in STRENGTHS:
        torch.manual_seed(zlib.crc32(names.encode()))
        pairs = {
            target.module: _pair(target, strength * merging.size(target)) for target in targets
        }
        changes = [(target, SCALE * pairs[target.module][1] @ pairs[target.module][0])
                   for target in targets]  # fmt: skip
        expected = merging.answer(changes)
        if expected[0] != merging.base[0]:
            break
    save_file(dict(_tensors(targets, pairs)), place / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
              "fan_in_fan_out": any(target.is_turned for target in targets),
              "target_modules": sorted({target.module.split(".")[-1] for target in targets}),
              "task_type": "CAUSAL_LM"}  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return place, expected


def _pair(target: Target, size: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B whose scaled product has this size."""
    rows, columns = target.places.shape
    if target.is_turned or target.is_embedding:
        rows, columns = columns, rows
    each = (size / SCALE / RANK**0.5) ** 0.5
    return each * torch.randn(RANK, columns), each * torch.randn(rows, RANK)


def _tensors(
    targets: Iterable[Target], pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for target in targets:
        for part, values in zip("AB", pairs[target.module], strict=True):
            word = f"lora_embedding_{part}" if target.is_embedding else f"lora_{part}.weight"
            yield f"base_model.model.{target.module}.{word}", values
