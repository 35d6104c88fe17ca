"""Pictures, sounds and videos for which the model's chat template has no place.

The template is the model's or the request's, so the client or the operator has to change something.
vLLM asserts that each has a place, which is a failure of the server on every route. Here it is a
fault of the request, with what to give.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: 500 with "Failed to apply prompt replacement for mm_items['image'][0]".
May go: when test_plain_vllm_asserts_a_place_for_each_picture fails.
"""

from typing import Any, Final

# Texts of vLLM's assertions and errors, which have no class of their own.
_MARKS: Final = ("Failed to apply prompt replacement for", "Expected there to be ")


def name_missing_places(processor: Any) -> None:
    """Make vLLM's processor of media refuse those that have no place in the text; None is none."""
    if processor is None:
        return
    apply = processor.apply

    def applied(*arguments: Any, **named: Any) -> Any:
        try:
            return apply(*arguments, **named)
        except (AssertionError, RuntimeError) as error:
            if not str(error).startswith(_MARKS):
                raise
            raise ValueError(
                "the model's chat template has no place for this picture, video or sound: give "
                "one that has (option.chat_template), or a checkpoint with the files of its "
                f"processor. vLLM: {error}"
            ) from None

    processor.apply = applied
