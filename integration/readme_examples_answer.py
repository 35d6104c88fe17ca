"""Every curl line of the README, sent as written to the embedded model, answers what it shows."""

import re
import shlex
from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import RunningServer

README = Path(__file__).parent.parent / "README.md"
# What differs from one answer to the next in vLLM's own bytes.
VOLATILE = re.compile(r'"(id":"chatcmpl-[^"]*|created":\d+|system_fingerprint":"[^"]*)"?')
EXAMPLES = re.findall(r"^\$ (curl .*)\n((?:(?!```).*\n)+)", README.read_text(), re.MULTILINE)


def parse_curl(line: str) -> tuple[str, dict[str, str], bytes]:
    """Return path, headers and body of a curl command of the README."""
    words = shlex.split(line)
    headers, body, path = {}, b"", ""
    for position, word in enumerate(words):
        if word == "-H":
            name, value = words[position + 1].split(": ")
            headers[name] = value
        elif word == "-d":
            body = words[position + 1].encode()
        elif word.startswith("localhost:8080"):
            path = word.removeprefix("localhost:8080")
    return path, headers, body


def test_readme_has_five_examples() -> None:
    """The README keeps its promise of five lines to try."""
    assert len(EXAMPLES) == 5


@pytest.mark.vllm
@pytest.mark.parametrize(("line", "shown"), EXAMPLES, ids=[str(n) for n in range(len(EXAMPLES))])
def test_readme_example_answers_as_shown(demo_server: RunningServer, line: str, shown: str) -> None:
    """The answer is the README's, byte for byte but for ids and times."""
    path, headers, body = parse_curl(line)
    answer = call(demo_server.url, path, body, headers=headers).body.decode()
    assert VOLATILE.sub("", answer).strip() == VOLATILE.sub("", shown).strip()
