"""The program that `client_libraries.py` runs in an environment of its own: calls, as JSON.

Clients that pin older libraries than ours have no place beside them.
"""

import json
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

QUESTION: Final = "What is the capital of France?"


def cohere(url: str) -> dict[str, Any]:
    """Embed with Cohere's own SDK, floats and integers, and rank."""
    import cohere as sdk  # noqa: PLC0415 (only in its own environment)

    client = sdk.ClientV2(api_key="none", base_url=url)
    texts = ["rain", "sea"]
    made = client.embed(
        model="lmi", texts=texts, input_type="search_document", embedding_types=["float", "int8"]
    )
    ranked = client.rerank(model="lmi", query="rain", documents=["sea", "rain"])
    found: dict[str, Any] = {
        "texts": made.texts,
        "float": made.embeddings.float_,
        "int8": made.embeddings.int8,
        "ranked": [(one.index, one.relevance_score) for one in ranked.results],
    }
    try:
        client.embed(model="other", texts=texts, input_type="search_query")
    except sdk.NotFoundError as error:
        found["error"] = error.body
    return found


def instructor(url: str) -> dict[str, Any]:
    """Have a schema kept: by the grammar, and by a tool's call."""
    import instructor as library  # noqa: PLC0415 (only in its own environment)
    from openai import OpenAI  # noqa: PLC0415 (an older one than ours)
    from pydantic import BaseModel  # noqa: PLC0415 (with the others)

    class Name(StrEnum):
        paris = "Paris"
        rome = "Rome"

    class City(BaseModel):
        name: Name
        is_capital: bool

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    found: dict[str, Any] = {}
    for mode in (library.Mode.JSON_SCHEMA, library.Mode.TOOLS_STRICT):
        city = library.from_openai(client, mode=mode).chat.completions.create(
            model="lmi",
            messages=[{"role": "user", "content": QUESTION}],
            response_model=City,
            temperature=0,
            max_retries=0,
        )
        found[mode.value] = [str(city.name), city.is_capital]
    partial = library.from_openai(client, mode=library.Mode.JSON_SCHEMA)
    for city in partial.chat.completions.create_partial(
        model="lmi", messages=[{"role": "user", "content": QUESTION}], response_model=City
    ):
        found["partial"] = str(city.name)
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
    {"cohere": cohere, "instructor": instructor, "llama_index": llama_index}
)

if __name__ == "__main__":
    print(json.dumps(CLIENTS[sys.argv[1]](sys.argv[2])))
