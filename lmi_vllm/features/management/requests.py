"""What the calls of the management API share: their arguments, and lists a page at a time."""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import orjson
from aiohttp import web

from lmi_vllm.errors import BadParameterError
from lmi_vllm.inference.request.body import not_json
from lmi_vllm.web.inference_routes import json_answer, read_body

PAGE_SIZE: Final = 100
MAX_PARAMETERS: Final = 1024  # of one call; each may have a line in the log
LONGEST_TEXT: Final = 65536  # characters of one, which an error may repeat


async def given_arguments(request: web.Request, names: Collection[str]) -> Mapping[str, Any]:
    """Return query parameters over the fields of a JSON body.

    Of one of `names` given more than once the first counts, of other parameters none.

    Raises:
        BadParameterError: the body is not a JSON object, or has too much in it.
    """
    body = await read_body(request)
    fields: dict[str, Any] = {}
    if body:
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise BadParameterError(f"The {not_json(error, request.content_type)}") from None
        if not isinstance(fields, dict):
            raise BadParameterError("The body must be a JSON object")
    query = {
        name: request.query[name]
        for name in request.query
        if name in names or len(request.query.getall(name)) == 1
    }
    given = {**fields, **query}
    if len(given) > MAX_PARAMETERS:
        raise BadParameterError(f"at most {MAX_PARAMETERS} parameters are allowed")
    for name, value in given.items():
        if len(name) > LONGEST_TEXT or (isinstance(value, str) and len(value) > LONGEST_TEXT):
            raise BadParameterError(
                f"{name:.80}: at most {LONGEST_TEXT} characters of a parameter are allowed"
            )
    return given


def page_answer(
    name: str,
    items: Sequence[object],
    query: Mapping[str, str],
    numbers: Sequence[int] | None = None,
) -> web.Response:
    """Answer with one page of a list, and with the token of the next one if there is one.

    `numbers` are those of the items, in rising order, and stay while other items come and go.
    """
    numbers = range(1, len(items) + 1) if numbers is None else numbers
    first, end, token = _page_of(numbers, query)
    page: dict[str, object] = {name: items[first:end]}
    return json_answer(page if token is None else {**page, "nextPageToken": token})


def _page_of(numbers: Sequence[int], query: Mapping[str, str]) -> tuple[int, int, str | None]:
    """Return the bounds of the page that `limit` and `next_page_token` name, and the next token.

    A token is the number of the last item before the page.

    Raises:
        BadParameterError: they are no numbers, or no page has an entry.
    """
    try:
        limit = int(query.get("limit", PAGE_SIZE))
        before = max(0, int(query.get("next_page_token", 0)))
    except ValueError:
        raise BadParameterError("limit and next_page_token must be whole numbers") from None
    if limit == 0:
        raise BadParameterError("limit must be at least 1: pages of 0 entries have no end")
    if not 0 < limit <= PAGE_SIZE:
        limit = PAGE_SIZE
    first = bisect_right(numbers, before)
    end = min(first + limit, len(numbers))
    last = numbers[end - 1] if end > first else before
    return first, end, str(last) if end < len(numbers) else None
