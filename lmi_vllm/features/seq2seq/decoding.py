"""Decoding with an encoder-decoder model of Transformers, in a batch that changes.

Rows of the batch have different lengths. The self-attention caches are padded on the *left*, so
that every row's newest token is at the same place, and masked there. T5's position bias depends
on the distance of two tokens alone, so padding before both changes nothing. BART and
similar models add a learned vector for each absolute position: there each row is given its own
position (`_Positions`).
The encoder's side is padded on the right and masked. A row is computed alone until its first token
is known and then joins; so nothing that Transformers' `generate` would not compute enters a row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from lmi_vllm.features.seq2seq.model import position_embeddings


class _Positions:
    """Gives each row of a decoding step the vector of its own position."""

    def __init__(self, embeddings: torch.nn.Module) -> None:
        self.rows: torch.Tensor | None = None  # None: one row, whose position the model counts
        embeddings.register_forward_pre_hook(self._before, with_kwargs=True)
        embeddings.register_forward_hook(self._after)

    def _before(self, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return None if self.rows is None else (args, {**kwargs, "position_ids": self.rows})

    def _after(self, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self.rows is None:
            return None
        return output.reshape(len(self.rows), 1, output.shape[-1])


class DecodingBatch:
    """The rows that are being decoded together."""

    def __init__(self, model: Any, start_token: int) -> None:
        self._model = model
        self._device = model.device
        self._start = start_token
        embeddings = position_embeddings(model)
        self._positions = None if embeddings is None else _Positions(embeddings)
        self._lengths: list[int] = []  # of each row's self-attention cache
        self._encoder_lengths: list[int] = []
        self._encoder_states = torch.empty(0)  # [row, token, feature]
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def __len__(self) -> int:
        return len(self._lengths)

    def encode(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return the encoder's hidden states of one prompt: [1, token, feature]."""
        ids = torch.tensor([list(prompt)], device=self._device)
        output = self._model.get_encoder()(input_ids=ids, attention_mask=torch.ones_like(ids))
        encoder_states: torch.Tensor = output.last_hidden_state
        return encoder_states

    def join(self, encoder_states: torch.Tensor) -> torch.Tensor:
        """Add a row at the end; returns the logits of its first token: [vocabulary]."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        mask = torch.ones(encoder_states.shape[:2], dtype=torch.long, device=self._device)
        logits = self._forward(cache, encoder_states, mask, [self._start], mask[:, :1])
        if not self._lengths:
            self._cache, self._encoder_states = cache, encoder_states
        else:
            self._append(cache, encoder_states)
        self._lengths.append(1)
        self._encoder_lengths.append(encoder_states.shape[1])
        return logits[0]

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Give each row its newest token; returns the next logits: [row, vocabulary]."""
        lengths = torch.tensor(self._lengths, device=self._device)
        if self._positions is not None:
            self._positions.rows = lengths
        longest = max(self._lengths) + 1
        positions = torch.arange(longest, device=self._device)
        mask = (positions >= (longest - 1 - lengths)[:, None]).long()
        encoder_positions = torch.arange(self._encoder_states.shape[1], device=self._device)
        encoder_lengths = torch.tensor(self._encoder_lengths, device=self._device)
        encoder_mask = (encoder_positions < encoder_lengths[:, None]).long()
        try:
            logits = self._forward(self._cache, self._encoder_states, encoder_mask, tokens, mask)
        finally:
            if self._positions is not None:
                self._positions.rows = None
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Remove all other rows, and the padding that only they needed."""
        if len(rows) == len(self._lengths):
            return
        self._lengths = [self._lengths[row] for row in rows]
        self._encoder_lengths = [self._encoder_lengths[row] for row in rows]
        if not rows:
            self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            self._encoder_states = torch.empty(0)
            return
        index = torch.tensor(list(rows), device=self._device)
        own, encoder_length = max(self._lengths), max(self._encoder_lengths)
        for layer in self._cache.self_attention_cache.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]
            layer.keys, layer.values = layer.keys[:, :, -own:], layer.values[:, :, -own:]
        for layer in self._cache.cross_attention_cache.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]
            layer.keys, layer.values = (
                layer.keys[:, :, :encoder_length],
                layer.values[:, :, :encoder_length],
            )
        self._encoder_states = self._encoder_states[index][:, :encoder_length]

    def _append(self, cache: EncoderDecoderCache, encoder_states: torch.Tensor) -> None:
        longest, encoder_length = (
            max(self._lengths),
            max(self._encoder_states.shape[1], encoder_states.shape[1]),
        )
        own = zip(
            self._cache.self_attention_cache.layers, cache.self_attention_cache.layers, strict=True
        )
        for ours, new in own:
            left = (0, 0, longest - 1, 0)
            ours.keys = torch.cat([ours.keys, pad(new.keys, left)])
            ours.values = torch.cat([ours.values, pad(new.values, left)])
        cross = zip(
            self._cache.cross_attention_cache.layers,
            cache.cross_attention_cache.layers,
            strict=True,
        )
        for ours, new in cross:
            ours.keys = _stacked(ours.keys, new.keys, encoder_length)
            ours.values = _stacked(ours.values, new.values, encoder_length)
        self._encoder_states = _stacked(
            self._encoder_states[:, None], encoder_states[:, None], encoder_length
        )[:, 0]

    def _forward(
        self,
        cache: EncoderDecoderCache,
        encoder_states: torch.Tensor,
        encoder_mask: torch.Tensor,
        tokens: Sequence[int],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        output = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoder_states),
            attention_mask=encoder_mask,
            decoder_input_ids=torch.tensor([[token] for token in tokens], device=self._device),
            decoder_attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1].float().cpu()
        return logits


def _stacked(ours: torch.Tensor, new: torch.Tensor, length: int) -> torch.Tensor:
    """Return two tensors of [row, head, token, feature] as one, padded on the right to `length`."""
    return torch.cat([pad(one, (0, 0, 0, length - one.shape[2])) for one in (ours, new)])
