"""What the calls of the management API share: their arguments, and lists a page at a time."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import orjson
from aiohttp import web

from lmi_vllm.errors import BadParameterError
from lmi_vllm.web.inference_routes import json_answer, read_body

Item = TypeVar("Item")

PAGE_SIZE: Final = 100


async def given_arguments(request: web.Request, names: Collection[str]) -> Mapping[str, Any]:
    """Return query parameters over the fields of a JSON body.

    Of one of `names` given more than once the first counts, of other parameters none.

    Raises:
        BadParameterError: the body is not a JSON object.
    """
    body = await read_body(request)
    fields: dict[str, Any] = {}
    if body:
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise BadParameterError(f"The body is not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise BadParameterError("The body must be a JSON object")
    query = {
        name: request.query[name]
        for name in request.query
        if name in names or len(request.query.getall(name)) == 1
    }
    return {**fields, **query}


def page_answer(name: str, items: Sequence[Item], query: Mapping[str, str]) -> web.Response:
    """Answer with one page of a list, and with the token of the next one if there is one."""
    shown, token = _page_of(items, query)
    page: dict[str, object] = {name: shown}
    return json_answer(page if token is None else {**page, "nextPageToken": token})


def _page_of(items: Sequence[Item], query: Mapping[str, str]) -> tuple[Sequence[Item], str | None]:
    """Return the page that `limit` and `next_page_token` name, and the next one's token.

    Raises:
        BadParameterError: they are no numbers.
    """
    try:
        limit = int(query.get("limit", PAGE_SIZE))
        offset = max(0, int(query.get("next_page_token", 0)))
    except ValueError:
        raise BadParameterError("limit and next_page_token must be whole numbers") from None
    if not 0 <= limit <= PAGE_SIZE:
        limit = PAGE_SIZE
    end = offset + limit
    return items[offset:end], str(end) if end < len(items) else None
