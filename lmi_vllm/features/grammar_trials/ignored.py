r"""What a grammar library leaves out of a grammar, and only says in a warning.

xgrammar writes warnings to the error output, and compiles the rest: a look-ahead in a `pattern` of
a schema is left out, and `\A` is the letter A. An answer would break the pattern silently.
Anchors in the middle, as in `(^$|^a)`, are left out, too. Where they change nothing these are
served, and `contradictions.py` sees others. Other warnings are of what vLLM refuses itself.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final

_STDERR: Final = 2
_REFUSED: Final = (  # a warning, and what is said instead, with the part that it names
    (
        re.compile(r"Look(?:ahead|behind) assertion .* ignored in regex: (.*)"),
        "the grammar library would ignore the look-ahead or look-behind in the pattern {}: write "
        "one without (?=, (?!, (?<= and (?<!",
    ),
    (
        re.compile(r"Escape sequence '?(\\[A-Za-z])'? is not recognized"),
        "the grammar library does not know {} in a pattern, and would take it for the letter",
    ),
    (  # of xgrammar 0.2.7, which vLLM 0.31 has
        re.compile(r"(Negative) Character class contains byte greater than 127"),
        "the grammar library reads only ASCII letters in a class such as [^a], and would let an "
        "answer have others that the class excludes: leave them out, and \\S, \\W and \\D",
    ),
)


@contextlib.contextmanager
def nothing_left_out() -> Iterator[None]:
    """Read the error output of this process meanwhile, which is a child that tries one grammar.

    Raises:
        ValueError: a part of a pattern was left out.
    """
    kept, warnings = os.dup(_STDERR), os.memfd_create("warnings")
    os.dup2(warnings, _STDERR)
    try:
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        written = os.pread(warnings, os.fstat(warnings).st_size, 0)
        os.close(warnings)
    check_warnings(written.decode(errors="replace"))


def check_warnings(text: str) -> None:
    """Check what a library has written.

    Raises:
        ValueError: it left out a part of a pattern.
    """
    for warning, refusal in _REFUSED:
        if found := warning.search(text):
            raise ValueError(refusal.format(found[1]))
