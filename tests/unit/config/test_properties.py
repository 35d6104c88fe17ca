"""serving.properties (docs/option-values.md#file-syntax), against an independent reader too."""

from pathlib import Path

import javaproperties
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_vllm.config.properties import parse_properties, read_properties

CASES = (
    ("key=value", [("key", "value", 1)]),
    ("key: value", [("key", "value", 1)]),
    ("key value", [("key", "value", 1)]),
    ("  key = value  ", [("key", "value", 1)]),
    ("# c\n! c\n\nkey=v", [("key", "v", 4)]),
    ("a=1\\\n   2\nb=3", [("a", "12", 1), ("b", "3", 3)]),
    ("a=1\\\\\nb=2", [("a", "1\\", 1), ("b", "2", 2)]),
    ("a=\\t\\n\\\\\\u0041", [("a", "\t\n\\A", 1)]),
    ('a=\\"x\\"', [("a", '"x"', 1)]),
    ('option.kv_transfer_config={"kv_connector":"X"}',
     [("option.kv_transfer_config", '{"kv_connector":"X"}', 1)]),
    ("a=b=c", [("a", "b=c", 1)]),
    ("a", [("a", "", 1)]),
    ("a\\ b=c", [("a b", "c", 1)]),
    ("A=1\na=2", [("A", "1", 1), ("a", "2", 2)]),
    ("a=1\r\nb=2\rc=3", [("a", "1", 1), ("b", "2", 2), ("c", "3", 3)]),
    ("a=\\ud83d\\ude00", [("a", "\U0001f600", 1)]),
    ("a=x\\", [("a", "x", 1)]),
)  # fmt: skip


@pytest.mark.parametrize(("text", "entries"), CASES)
def test_syntax_is_read_as_java_does(text: str, entries: list[tuple[str, str, int]]) -> None:
    """Separators, comments, joined lines and escapes, with line numbers."""
    assert [(e.key, e.value, e.line) for e in parse_properties(text).entries] == entries


def test_file_is_utf8_and_else_latin_1(tmp_path: Path) -> None:
    """UTF-8 with or without a mark; bytes that are no UTF-8 are Latin-1."""
    path = tmp_path / "f"
    for data in ("a=é".encode(), "\ufeffa=é".encode(), "a=é".encode("latin-1")):
        path.write_bytes(data)
        assert read_properties(path).by_key()["a"].value == "é"


@given(st.text())
def test_no_text_is_an_error(text: str) -> None:
    """As in Java, every text is a properties file."""
    for entry in parse_properties(text).entries:
        assert 1 <= entry.line <= text.count("\n") + text.count("\r") + 1


SAFE = st.text(alphabet="ab=: \t#!\\\n\"'.{}u0041é", max_size=60)


@given(SAFE)
def test_agrees_with_an_independent_reader_but_for_trailing_blanks(text: str) -> None:
    """Javaproperties gives the same keys and values wherever Java's and our rules agree."""
    try:
        theirs = javaproperties.loads(text)
    except javaproperties.InvalidUEscapeError:
        return  # Java refuses a broken \\u escape, we keep its letters
    ours = {entry.key: entry.value for entry in parse_properties(text).entries}
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert theirs[key].rstrip() == value.rstrip()


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=5))
def test_files_of_an_independent_writer_are_read(pairs: dict[str, str]) -> None:
    """Any keys and values survive, protected blanks included."""
    plain = {k: v for k, v in pairs.items() if not any("\ud800" <= c <= "\udfff" for c in k + v)}
    text = javaproperties.dumps(plain, timestamp=False)
    ours = {entry.key: entry.value.rstrip() for entry in parse_properties(text).entries}
    assert ours == {key: value.rstrip() for key, value in plain.items()}
