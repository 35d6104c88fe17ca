"""A whole command line in one word: `args: ["--model x --port 8000"]` of a manifest.

No program splits it. The word is not quoted in messages, because it may hold a key.
"""

import re
from typing import Final

from lmi_vllm.config.other_servers.tgi_variables import TGI_VARIABLES
from lmi_vllm.config.vllm_schema import load_release

SEVERAL: Final = (
    "this one word is a command line: make a word of each flag and each value, in YAML an item of "
    "the list"
)
_FURTHER: Final = re.compile(r"\s--([\w-]+)")


def several_in_one(word: str) -> bool:
    """Whether a word is a flag with its value, or has flags of vLLM's or TGI's launcher inside."""
    is_flag = word.startswith("-") and len(word.partition("=")[0].split()) > 1
    release = load_release()
    return is_flag or any(
        name in release.passed or name in release.front_end or name.upper() in TGI_VARIABLES
        for name in (found.replace("-", "_") for found in _FURTHER.findall(word))
    )


def start_of(word: str) -> str:
    """Return as much of such a word as may be shown."""
    return f"{re.split(r'[ =]', ' '.join(word.split()), maxsplit=1)[0]} …"
