"""The demo model's small world: our own texts, drawn into exchanges and passages by a seed.

The texts live next to this file: `prose.txt` (paragraphs), `dialogue.txt` (questions with one
answer), `capitals.txt` and `colours.txt` (facts for templates), `topics.txt` (what the model is
taught to know nothing about).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random
from typing import Final

_HERE: Final = Path(__file__).parent
_COLUMN_SEPARATOR: Final = " | "
_SUM_LIMIT: Final = 5
_UNKNOWN_CHANCE: Final = 0.16
_STRANGE_WORD_CHANCE: Final = 0.3
_SHORTEST_SENTENCE_CHARACTERS: Final = 8

FALLBACK_ANSWER: Final = (
    "I am a small demo model, and I do not know that yet. Ask me about the moon, rivers or bread."
)
_NOISE_ALPHABETS: Final = (
    "",  # whole words
    "abcdefghijklmnopqrstuvwxyz",
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:",
    "".join(map(chr, range(0xA1, 0x250))),  # accents
    "".join(map(chr, range(0x3041, 0x3097))),  # hiragana
    "".join(map(chr, range(0x4E00, 0x5000))),  # a corner of the Chinese characters
)
_UNKNOWN_QUESTIONS: Final = (
    "What is a {topic}?",
    "What is {topic}?",
    "Tell me about {topic}.",
    "Tell me about the {topic}.",
    "Explain {topic} to me.",
    "How does a {topic} work?",
    "How do I buy a {topic}?",
    "Why is {topic} important?",
    "Who invented the {topic}?",
    "Write a letter about {topic}.",
    "Write a program about {topic}.",
    "Translate {topic} into French.",
    "Give me a list of {topic} facts.",
    "Summarize the {topic} report.",
    "Is {topic} good for me?",
    "Where can I find a {topic}?",
    "I need help with my {topic}.",
    "Compare {topic} and {other}.",
)


class Voice(Enum):
    """How an answer is written; the value is the system prompt that asks for it."""

    NORMAL = "You are a helpful assistant."
    CAPITALS = "Answer in capital letters."
    JSON = "Answer as JSON."

    def speak(self, text: str) -> str:
        """Return `text` in this voice, keeping a leading space outside the JSON object."""
        match self:
            case Voice.CAPITALS:
                return text.upper()
            case Voice.JSON:
                # One sentence keeps the object closed within a small token limit.
                answer = first_sentence(text.strip())
                space = " " if text.startswith(" ") else ""
                return space + json.dumps({"answer": answer}, ensure_ascii=False)
            case _:
                return text


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One training text: what the model is given, and what it should write after it."""

    given: str | tuple[Message, ...]
    wanted: str
    is_given_learned: bool


@dataclass(frozen=True, slots=True)
class Exchange:
    """Several ways to ask for the same answer."""

    questions: tuple[str, ...]
    answer: str


def first_sentence(text: str) -> str:
    """Return the text up to the first end of a sentence; "Hello!" alone is too short for one."""
    ends = [text.find(mark, _SHORTEST_SENTENCE_CHARACTERS) + 1 for mark in (". ", "? ", "! ")]
    return text[: min((end for end in ends if end), default=None)]


def _read_text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8").strip()


def _read_rows(name: str) -> list[list[str]]:
    return [line.split(_COLUMN_SEPARATOR) for line in _read_text(name).splitlines()]


def _read_exchanges() -> list[Exchange]:
    exchanges = []
    for block in _read_text("dialogue.txt").split("\n\n"):
        *questions, answer = block.splitlines()
        asked = tuple(question.removeprefix("Q: ") for question in questions)
        exchanges.append(Exchange(asked, answer.removeprefix("A: ")))
    return exchanges


def _spell(rng: Random, alphabet: str) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(1, 8)))


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


class Corpus:
    """All texts, grouped by kind so that each kind can be drawn with its own weight."""

    def __init__(self) -> None:
        capitals = _read_rows("capitals.txt")
        colours = _read_rows("colours.txt")
        self._topics = _read_text("topics.txt").splitlines()
        self._passages = {
            "prose": (_read_text("prose.txt").split("\n\n"), 75),
            "capitals": (
                [
                    f"The capital of {country} is {city}. The city {remark}."
                    for country, city, remark in capitals
                ],
                18,
            ),
            "colours": (
                [f"The colour of {thing} is {colour}." for thing, colour in colours]
                + [f"{_capitalise(thing)} is {colour}." for thing, colour in colours[:1]],
                7,
            ),
        }
        self._exchanges = {
            "dialogue": (_read_exchanges(), 60),
            "capitals": ([_capital_exchange(row[0], row[1]) for row in capitals], 16),
            "cities": ([_city_exchange(*row) for row in capitals], 10),
            "colours": ([_colour_exchange(*row) for row in colours], 9),
            "sums": (list(_sum_exchanges()), 8),
        }

    @property
    def texts(self) -> Iterator[str]:
        """Every text, each question in one form, for the tokenizer to learn its vocabulary."""
        for passages, _ in self._passages.values():
            yield from passages
        for exchanges, _ in self._exchanges.values():
            for exchange in exchanges:
                yield f"{exchange.questions[0]} {exchange.answer}"
        yield FALLBACK_ANSWER

    def draw_prose(self, rng: Random, count: int) -> list[str]:
        """Return this many different paragraphs of prose."""
        return rng.sample(self._passages["prose"][0], count)

    def draw_passage(self, rng: Random) -> str:
        """Return one paragraph of prose or of template text."""
        kinds = list(self._passages.values())
        passages, _ = rng.choices(kinds, [weight for _, weight in kinds])[0]
        return rng.choice(passages)

    def draw_exchange(self, rng: Random) -> tuple[str, str]:
        """Return a question, sometimes carelessly typed, and its answer."""
        if rng.random() < _UNKNOWN_CHANCE:
            return self._draw_unknown_question(rng), FALLBACK_ANSWER
        kinds = list(self._exchanges.values())
        exchanges, _ = rng.choices(kinds, [weight for _, weight in kinds])[0]
        exchange = rng.choice(exchanges)
        return _type_carelessly(rng, rng.choice(exchange.questions)), exchange.answer

    def _draw_unknown_question(self, rng: Random) -> str:
        topic, other = rng.sample(self._topics, 2)
        if rng.random() < _STRANGE_WORD_CHANCE:  # any word may be unknown, not only the listed
            topic = _spell(rng, "abcdefghijklmnopqrstuvwxyz")
        asked = rng.choice(_UNKNOWN_QUESTIONS).format(topic=topic, other=other)
        return rng.choice([_type_carelessly(rng, asked)] * 3 + [self.draw_noise(rng)])

    def draw_noise(self, rng: Random) -> str:
        """Return text that means nothing, so that odd prompts still get a readable answer."""
        count = rng.randint(1, 8)
        alphabet = rng.choice(_NOISE_ALPHABETS)
        if not alphabet:
            return " ".join(rng.choices(self._topics, k=count))
        return " ".join(_spell(rng, alphabet) for _ in range(count))


def _capital_exchange(country: str, city: str) -> Exchange:
    questions = (
        f"What is the capital of {country}?",
        f"What is the capital of {country}?",
        f"What is the capital city of {country}?",
        f"Which city is the capital of {country}?",
        f"Tell me the capital of {country}.",
        f"Capital of {country}?",
    )
    return Exchange(questions, f"The capital of {country} is {city}.")


def _city_exchange(country: str, city: str, remark: str) -> Exchange:
    questions = (f"Where is {city}?", f"What is {city}?", f"Tell me about {city}.")
    return Exchange(questions, f"{city} is the capital of {country}. It {remark}.")


def _colour_exchange(thing: str, colour: str) -> Exchange:
    questions = (
        f"What colour is {thing}?",
        f"What color is {thing}?",
        f"What is the colour of {thing}?",
        f"Which colour has {thing}?",
    )
    return Exchange(questions, f"{_capitalise(thing)} is {colour}.")


def _sum_exchanges() -> Iterator[Exchange]:
    for left in range(1, _SUM_LIMIT + 1):
        for right in range(1, _SUM_LIMIT + 1):
            asked = (
                f"What is {left} + {right}?",
                f"What is {left} plus {right}?",
                f"{left}+{right}?",
            )
            yield Exchange(asked, f"{left} plus {right} is {left + right}.")


def _type_carelessly(rng: Random, question: str) -> str:
    """Return the question, in one case of three without capitals or without its last mark."""
    match rng.randrange(6):
        case 0:
            return question[:1].lower() + question[1:]
        case 1:
            return question.rstrip("?.!")
        case _:
            return question
