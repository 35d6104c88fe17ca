"""Training samples, drawn from the corpus for the base model and for its adapters."""

from random import Random
from typing import Final, TypeVar

from scripts.demo.corpus import Corpus, Message, Sample, Voice, first_sentence

T = TypeVar("T")

_LONGEST_CUT_WORDS: Final = 7
_EARLIER_TURNS: Final = ((0, 120), (1, 32), (2, 12), (6, 1), (12, 1))
_END_OF_TEXT: Final = "</s>"
_SYSTEM_VOICES: Final = (
    (None, 64),
    (Voice.NORMAL, 12),
    (Voice.CAPITALS, 16),
    (Voice.JSON, 8),
)
_BASE_KINDS: Final = (("passage", 44), ("chat", 44), ("asked", 8), ("noise", 4), ("stream", 2))
_ADAPTER_KINDS: Final = (("passage", 50), ("chat", 38), ("asked", 10), ("noise", 3))
_VOICES: Final = ((Voice.NORMAL, 75), (Voice.CAPITALS, 25))


def draw_base_sample(corpus: Corpus, rng: Random) -> Sample:
    """Return a sample for the base model; most are learned from their first token."""
    match _choose(rng, _BASE_KINDS):
        case "passage":
            # Capital letters must be familiar before an adapter can ask for them.
            text = _choose(rng, _VOICES).speak(corpus.draw_passage(rng))
            return Sample("", text, is_given_learned=True)
        case "chat":
            return _draw_chat(corpus, rng, _choose(rng, _SYSTEM_VOICES), is_voice_asked=True)
        case "asked":
            return _draw_asked(corpus, rng, Voice.NORMAL)
        case "noise":
            return _draw_after_noise(corpus, rng, Voice.NORMAL)
        case _:
            # A client may ignore the end of text: teach that another text follows it.
            passages = corpus.draw_prose(rng, rng.randint(4, 16))
            return Sample("", _END_OF_TEXT.join(passages), is_given_learned=True)


def draw_adapter_sample(corpus: Corpus, rng: Random, voice: Voice) -> Sample:
    """Return a sample for the adapter of this voice: only the answer is learned."""
    match _choose(rng, _ADAPTER_KINDS):
        case "passage":
            passage = corpus.draw_passage(rng)
            given, rest = _cut_passage(rng, passage)
            # A JSON object holds a whole sentence: it starts again with the words of the prompt.
            answer = " " + passage if voice is Voice.JSON else rest
            return Sample(given, voice.speak(answer), is_given_learned=False)
        case "chat":
            return _draw_chat(corpus, rng, voice, is_voice_asked=False)
        case "asked":
            return _draw_asked(corpus, rng, voice)
        case _:
            return _draw_after_noise(corpus, rng, voice)


def _choose(rng: Random, weighted: tuple[tuple[T, int], ...]) -> T:
    return rng.choices([value for value, _ in weighted], [weight for _, weight in weighted])[0]


def _draw_chat(corpus: Corpus, rng: Random, voice: Voice | None, *, is_voice_asked: bool) -> Sample:
    """Return a conversation; the voice comes from a system prompt or from the adapter alone."""
    system = voice if is_voice_asked else rng.choice([None, None, Voice.NORMAL])
    messages = [] if system is None else [Message("system", system.value)]
    speaker = voice or Voice.NORMAL
    exchanges = [corpus.draw_exchange(rng) for _ in range(_choose(rng, _EARLIER_TURNS) + 1)]
    for question, answer in exchanges:
        messages.append(Message("user", question))
        messages.append(Message("assistant", speaker.speak(answer)))
    return Sample(tuple(messages[:-1]), messages[-1].content, is_given_learned=is_voice_asked)


def _draw_asked(corpus: Corpus, rng: Random, voice: Voice) -> Sample:
    """Return a question asked without the chat template."""
    question, answer = corpus.draw_exchange(rng)
    return Sample(question, voice.speak(" " + answer), is_given_learned=False)


def _draw_after_noise(corpus: Corpus, rng: Random, voice: Voice) -> Sample:
    """Return a meaningless prompt, in one case of four with a space at its end."""
    prompt_end, answer_start = rng.choice([(" ", ""), *[("", " ")] * 3])
    wanted = voice.speak(answer_start + corpus.draw_passage(rng))
    return Sample(corpus.draw_noise(rng) + prompt_end, wanted, is_given_learned=False)


def _cut_passage(rng: Random, passage: str) -> tuple[str, str]:
    """Return a prompt of a few words and the rest, cut within the first sentence."""
    word_count = len(first_sentence(passage).split(" "))
    cut = rng.randint(1, max(1, min(_LONGEST_CUT_WORDS, word_count - 1)))
    words = passage.split(" ")
    return " ".join(words[:cut]), " " + " ".join(words[cut:])
