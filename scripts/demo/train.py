"""Train the demo model: `python -m scripts.demo.train [--out DIR]`.

Writes a tokenizer, a Llama of under a million parameters and two LoRA adapters, in about seven
minutes on two free cores. Everything is drawn from one fixed seed: the same machine with the same
versions of torch, transformers and tokenizers writes the same bytes. Another kind of processor sums
floating-point numbers in another order, and training makes such differences grow: its weights are
others, though they know the same texts. The tokenizer and the configuration files are the same
everywhere.
"""

import argparse
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lmi_vllm.demo import DEMO_MODEL_DIR
from scripts.demo.adapter import attach_adapter, detach_adapter, save_adapter
from scripts.demo.corpus import Corpus, Sample, Voice
from scripts.demo.samples import draw_adapter_sample, draw_base_sample
from scripts.demo.tokenizer import VOCABULARY_SIZE, save_tokenizer, train_tokenizer

logger = logging.getLogger(__name__)

_SEED: Final = 20_240_607
_THREADS: Final = 2  # part of the seed: more threads sum in another order
_MAX_LENGTH_TOKENS: Final = 2048
_BATCH_TOKENS: Final = 2048
_POOL_SAMPLES: Final = 1024
_WARMUP_STEPS: Final = 40
_LOG_EVERY_STEPS: Final = 100
_IGNORED_LABEL: Final = -100
_BASE_NAME: Final = "lmi_vllm/demo"

_SERVING_PROPERTIES: Final = """\
# The demo model on a laptop: no accelerator, no network, ready in a few seconds.
option.dtype=fp32
option.max_model_len=2048
option.max_rolling_batch_size=64
# The adapters in adapters/ are loaded at start: "capitals" and "json".
option.enable_lora=true
option.max_loras=2
# Compiling a model this small takes longer than it ever saves.
option.enforce_eager=true
# 256 MiB hold 64 conversations of 2048 tokens.
option.kv_cache_memory_bytes=268435456
# One thread is enough here, and does not stall when the machine has other work.
option.env=OMP_NUM_THREADS=1,VLLM_CPU_OMP_THREADS_BIND=nobind
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how hard to train."""

    steps: int
    peak_rate: float
    weight_decay: float


_BASE_PLAN: Final = Plan(steps=1900, peak_rate=3e-3, weight_decay=0.02)
_ADAPTER_PLANS: Final = {
    # Names in capitals are cut into other tokens than names, and so take longer to learn.
    "capitals": (Voice.CAPITALS, Plan(steps=700, peak_rate=2e-3, weight_decay=0.0)),
    "json": (Voice.JSON, Plan(steps=320, peak_rate=2e-3, weight_decay=0.0)),
}

SampleSource = Callable[[Random], Sample]
EncodedSample = tuple[list[int], list[int]]


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama; vLLM's CPU attention needs heads of at least 32 values."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=_MAX_LENGTH_TOKENS,
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    model = LlamaForCausalLM(config)
    _share_letters(model.get_input_embeddings().weight, tokenizer.get_vocab())
    model.generation_config = GenerationConfig(**special)
    return model


@torch.no_grad()
def _share_letters(embeddings: torch.Tensor, ids: dict[str, int]) -> None:
    """Start each token in capitals as its small twin plus one step shared by all of them.

    An adapter then only needs that step to change the case of everything the base model knows.
    """
    step = torch.randn(embeddings.shape[1]) * embeddings.std()
    for token, small_id in sorted(ids.items()):
        letters = token.removeprefix("Ġ")  # byte-level BPE writes a space as Ġ
        if letters.isascii() and letters.islower() and token.upper() in ids:
            embeddings[ids[token.upper()]] = embeddings[small_id] + step


def encode_sample(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> EncodedSample:
    """Return token ids and labels; what is given is encoded alone, as a server does it."""
    if isinstance(sample.given, str):
        given = tokenizer.encode(sample.given)
    else:
        messages = [{"role": m.role, "content": m.content} for m in sample.given]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        given = tokenizer.encode(text, add_special_tokens=False)
    wanted = tokenizer.encode(sample.wanted, add_special_tokens=False)
    wanted.append(tokenizer.eos_token_id)
    labels = given if sample.is_given_learned else [_IGNORED_LABEL] * len(given)
    return given + wanted, labels + wanted


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, draw: SampleSource, rng: Random
) -> Iterator[list[EncodedSample]]:
    """Yield batches of samples of similar length, without end."""
    while True:
        pool = [encode_sample(tokenizer, draw(rng)) for _ in range(_POOL_SAMPLES)]
        pool.sort(key=lambda encoded: len(encoded[0]))
        batches: list[list[EncodedSample]] = [[]]
        for encoded in pool:
            if (len(batches[-1]) + 1) * len(encoded[0]) > _BATCH_TOKENS:
                batches.append([])
            batches[-1].append(encoded)
        rng.shuffle(batches)
        yield from batches


def _pad(rows: list[list[int]], filler: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def compute_loss(model: nn.Module, batch: list[EncodedSample], pad_id: int) -> torch.Tensor:
    """Return the mean loss of a batch; padding is on the right, so it needs no mask."""
    ids = _pad([ids for ids, _ in batch], pad_id)
    labels = _pad([labels for _, labels in batch], _IGNORED_LABEL)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED_LABEL
    )


def _rate_share(step: int, steps: int) -> float:
    """Return the share of the peak rate: a short rise, then a cosine down to nothing."""
    if step < _WARMUP_STEPS:
        return (step + 1) / _WARMUP_STEPS
    done = (step - _WARMUP_STEPS) / (steps - _WARMUP_STEPS)
    return 0.5 * (1 + math.cos(math.pi * done))


def fit(model: nn.Module, batches: Iterator[list[EncodedSample]], plan: Plan, pad_id: int) -> None:
    """Train the model's trainable parameters in place."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=plan.peak_rate, betas=(0.9, 0.95), weight_decay=plan.weight_decay
    )
    started = time.monotonic()
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.peak_rate * _rate_share(step, plan.steps)
        loss = compute_loss(model, next(batches), pad_id)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % _LOG_EVERY_STEPS == 0 or step == plan.steps - 1:
            seconds = time.monotonic() - started
            logger.info("step %d loss %.3f after %.0f s", step, loss.item(), seconds)


def train_adapters(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, out: Path
) -> None:
    """Train and save one adapter per voice on the finished base model."""
    for name, (voice, plan) in _ADAPTER_PLANS.items():
        logger.info("adapter %s", name)
        torch.manual_seed(_SEED)  # an adapter does not depend on what was trained before it
        wrapped = attach_adapter(model)

        def draw(rng: Random, voice: Voice = voice) -> Sample:
            return draw_adapter_sample(corpus, rng, voice)

        batches = draw_batches(tokenizer, draw, Random(_SEED))
        fit(model, batches, plan, tokenizer.pad_token_id)
        save_adapter(wrapped, out / "adapters" / name, _BASE_NAME)
        detach_adapter(model, wrapped)


def train_all(out: Path) -> None:
    """Write the whole demo model into `out`."""
    torch.manual_seed(_SEED)
    torch.set_num_threads(_THREADS)
    torch.use_deterministic_algorithms(mode=True)
    corpus = Corpus()
    tokenizer = train_tokenizer(corpus.texts, _MAX_LENGTH_TOKENS)
    model = build_model(tokenizer)
    logger.info("base model of %d parameters", model.num_parameters())
    batches = draw_batches(tokenizer, lambda rng: draw_base_sample(corpus, rng), Random(_SEED))
    fit(model, batches, _BASE_PLAN, tokenizer.pad_token_id)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    save_tokenizer(tokenizer, out)
    (out / "serving.properties").write_text(_SERVING_PROPERTIES, encoding="utf-8")
    train_adapters(model, tokenizer, corpus, out)
    for path in out.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors lets only the owner read; packages are read by others


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model and its adapters.")
    parser.add_argument("--out", type=Path, default=DEMO_MODEL_DIR, metavar="DIR")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train_all(arguments.out)


if __name__ == "__main__":
    main()
