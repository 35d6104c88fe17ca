"""A Whisper of two layers that hears nothing it knows: random weights from a fixed seed."""

import io
import json
import math
import struct
import wave
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

_END = "<|endoftext|>"
_MARKS = (
    _END, "<|startoftranscript|>", "<|en|>", "<|fr|>", "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
_RATE = 16000


def whisper(folder: Path) -> Path:
    """Write the model; its text is bytes and the marks that vLLM's prompts are made of."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, bos_token=_END, unk_token=_END, pad_token=_END
    ).save_pretrained(folder)
    _change(folder / "tokenizer_config.json", tokenizer_class="WhisperTokenizer")
    torch.manual_seed(0)
    ends = dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.token_to_id(_END)
    )
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(), d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, decoder_start_token_id=tokenizer.token_to_id(_MARKS[1]), **ends,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    _change(folder / "preprocessor_config.json", processor_class="WhisperProcessor")
    return folder


def _tokenizer() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(list(_MARKS))
    return found


def _change(path: Path, **more: object) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) | more
    path.write_text(json.dumps(document), encoding="utf-8")


def tone() -> bytes:
    """Return a second of a hum as WAV."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        wanted = (int(8000 * math.sin(i / 10)) for i in range(_RATE))
        file.writeframes(b"".join(struct.pack("<h", one) for one in wanted))
    return target.getvalue()


def wav_of_floats(sample: float, count: int, rate: int = _RATE) -> bytes:
    """Return a WAV of one sample, so many times, as floats of 32 bits: NaN is possible."""
    samples = struct.pack("<f", sample) * count
    form = struct.pack("<IHHIIHH", 16, 3, 1, rate, 4 * rate, 4, 32)  # 3: floats
    body = b"WAVEfmt " + form + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body
