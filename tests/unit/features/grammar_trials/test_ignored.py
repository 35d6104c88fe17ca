"""What a grammar library says that it leaves out is refused, and nothing else that it says."""

import os
import sys

import pytest

from lmi_vllm.features.grammar_trials.ignored import check_warnings, nothing_left_out

PLACE = "[20:50:04] /project/cpp/fsm_builder.cc:1311: Warning: "
LEFT_OUT = {
    "look-ahead": "Lookahead assertion is not supported and is ignored in regex: ^(?!a)b$\n",
    "letter A": "Escape sequence \\A is not recognized in regex; matching the\n",
    "class": "Negative Character class contains byte greater than 127, clamping to 127.\n",
    "\\Z in": "Regex parsing warning at position 5: Escape sequence '\\Z' is not recognized. The\n",
}
HARMLESS = (
    "Anchor '$' in the middle of regex is ignored: (^$|^a)\n",
    "Escape sequence '\\_' is not recognized. The character itself will be matched\n",
)


@pytest.mark.parametrize("line", LEFT_OUT.values(), ids=LEFT_OUT)
def test_part_of_a_pattern_that_is_left_out_is_refused(line: str) -> None:
    """Each form of xgrammar's warnings (0.2.7, 0.2.8)."""
    with pytest.raises(ValueError, match=r"look-ahead|does not know|only ASCII letters"):
        check_warnings(PLACE + line)


@pytest.mark.parametrize("line", HARMLESS)
def test_what_changes_no_text_is_served(line: str) -> None:
    """Anchors at the ends of alternatives, and escaped signs, are common."""
    check_warnings(PLACE + line)


@pytest.mark.skipif(sys.platform != "linux", reason="trials run on Linux")
def test_error_output_is_read_and_given_back() -> None:
    """A library in C++ writes to the descriptor; afterwards it is the former one again."""
    before = os.fstat(2)
    with pytest.raises(ValueError, match=r"the pattern \^\(\?!a\)b\$"), nothing_left_out():
        os.write(2, (PLACE + LEFT_OUT["look-ahead"]).encode())
    assert os.fstat(2) == before
