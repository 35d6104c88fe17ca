"""The program that `client_libraries.py` runs in an environment of its own: calls, as JSON.

Clients that pin older libraries than ours have no place beside them.
"""

import json
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

QUESTION: Final = "What is the capital of France?"


def instructor(url: str) -> dict[str, Any]:
    """Have a schema kept, whole and field after field."""
    import instructor as library  # noqa: PLC0415 (only in its own environment)
    from openai import OpenAI  # noqa: PLC0415 (an older one than ours)
    from pydantic import BaseModel  # noqa: PLC0415 (with the others)

    class City(BaseModel):
        name: Literal["Paris", "Rome"]
        is_capital: bool

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    found: dict[str, Any] = {}
    # By tools it has no grammar: it sends no "strict", without which vLLM holds to no schema.
    bound = library.from_openai(client, mode=library.Mode.JSON_SCHEMA)
    asked = {"model": "lmi", "messages": [{"role": "user", "content": QUESTION}]}
    city = bound.chat.completions.create(**asked, response_model=City, max_retries=0)
    found["whole"] = [city.name, city.is_capital]
    for city in bound.chat.completions.create_partial(**asked, response_model=City):
        found["partial"] = [city.name, city.is_capital]
    return found


def llama_index(url: str) -> dict[str, Any]:
    """Chat and complete, whole and streamed."""
    from llama_index.core.llms import ChatMessage  # noqa: PLC0415 (only in its own environment)
    from llama_index.llms.openai_like import OpenAILike  # noqa: PLC0415

    where = {"model": "lmi", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    chat = OpenAILike(**where, is_chat_model=True, max_tokens=20)
    text = OpenAILike(**where, is_chat_model=False, max_tokens=4)
    messages = [ChatMessage(role="user", content=QUESTION)]
    prompt = "The capital of France is"
    return {
        "chat": chat.chat(messages).message.content,
        "chat streamed": "".join(part.delta or "" for part in chat.stream_chat(messages)),
        "text": text.complete(prompt).text,
        "text streamed": "".join(part.delta or "" for part in text.stream_complete(prompt)),
    }


CLIENTS: Final[Mapping[str, Callable[[str], dict[str, Any]]]] = MappingProxyType(
    {"instructor": instructor, "llama_index": llama_index}
)

if __name__ == "__main__":
    print(json.dumps(CLIENTS[sys.argv[1]](sys.argv[2])))
