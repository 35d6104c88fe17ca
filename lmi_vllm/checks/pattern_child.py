"""A child process that matches untrusted regular expressions, and can be killed.

It runs as a script, so it imports no module of this package. It reads {"patterns": [...], "names":
[...]} and writes for each name the position of the first pattern that matches, or null. As in PEFT
and vLLM (vllm/lora/peft_helper.py), a pattern matches a suffix of the name after a dot.
"""

import json
import resource
import sys

try:
    import regex as re  # type: ignore[import-untyped,unused-ignore]  # vLLM's
except ImportError:
    import re  # type: ignore[no-redef,unused-ignore]

CPU_SECONDS = 2
MEMORY_BYTES = 1 << 30


def main() -> None:
    """Answer one question; a pattern that cannot be compiled ends the process with its position."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    question = json.load(sys.stdin)
    compiled = []
    for position, pattern in enumerate(question["patterns"]):
        try:
            compiled.append(re.compile(rf"(.*\.)?({pattern})$"))
        except (re.error, RecursionError, OverflowError) as error:
            json.dump({"wrong": position, "error": str(error)[:200]}, sys.stdout)
            return
    positions = [
        next((index for index, one in enumerate(compiled) if one.match(name)), None)
        for name in question["names"]
    ]
    json.dump({"found": positions}, sys.stdout)


if __name__ == "__main__":
    main()
