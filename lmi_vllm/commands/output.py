"""Writing a verb's answer to stdout, whatever the configuration's text and the terminal hold."""

import sys


def write_answer(text: str) -> None:
    """Print `text` and a newline; characters the stream cannot take are written as escapes.

    Variables that are no UTF-8 reach us as lone surrogates, which no encoding can write.
    """
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
