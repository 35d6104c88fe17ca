"""Pictures, sounds and videos of requests that were read and never sent to the engine.

VLLM's server remembers which media the engine has, so that it sends each once. It notes them while
it reads a request, and sends them much later, or never: the request waits for an adapter's slot or
for the trial of its grammar, is refused, or is given up. The next request with the same picture is
then sent without it. Here media count as the engine's once a request with them was sent. Until then
each request brings its own.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: 500 for a picture that an earlier request had, which was refused or ended before it was sent.
May go: when test_plain_vllm_forgets_a_picture_that_it_never_sent fails.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

_PARTS: Final = ("encoder_prompt", "decoder_prompt")  # of a prompt for an encoder and a decoder


class SentMedia:
    """A mixin for vLLM's cache of media in the server: what was not sent is not there."""

    _cache: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._sent: set[str] = set()

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether the engine has it: vLLM reads the item again if not."""
        return mm_hash in self._sent and mm_hash in self._cache

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        """Return what to send: the item itself, if vLLM has read it and it was not sent."""
        if mm_item is not None and not self.is_cached_item(mm_hash):
            self.invalidate(mm_hash)
        return super().get_and_update_item(mm_item, mm_hash)  # type: ignore[misc]

    def invalidate(self, mm_hash: str) -> None:
        """Forget an item."""
        self._sent.discard(mm_hash)
        super().invalidate(mm_hash)  # type: ignore[misc]

    def clear_cache(self) -> None:
        """Forget all items."""
        self._sent.clear()
        super().clear_cache()  # type: ignore[misc]

    def note_sent(self, prompt: object) -> None:
        """Take the media of a prompt that was sent for the engine's."""
        self._sent.update(one for one in _hashes(prompt) if one in self._cache)
        if len(self._sent) > 2 * len(self._cache):  # vLLM has dropped some
            self._sent.intersection_update(self._cache)


def once_sent(original: type[Any]) -> type[Any]:
    """Return vLLM's cache of what the engine has, in which media are only what was sent."""
    return type(SentMedia.__name__, (SentMedia, original), {})


def _hashes(prompt: object) -> Iterator[str]:
    """Yield the hashes of a prompt's media."""
    if not isinstance(prompt, Mapping):
        return
    for part in (prompt, *(prompt.get(name) or {} for name in _PARTS)):
        for hashes in (part.get("mm_hashes") or {}).values():
            yield from (one for one in hashes if isinstance(one, str))
