"""The reverse proxy of a further front-end process: what it does not answer goes to the first one.

It answers inference, which any process can do. Health, metrics, adapters, models, the console,
stored responses and asynchronous answers need state that only the first process has.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Final

import aiohttp
from aiohttp import web
from yarl import URL

from lmi_vllm.errors import NotReadyError, PayloadError, ResourceNotFoundError
from lmi_vllm.web.inference_routes import UNREADABLE_BODY, request_properties
from lmi_vllm.web.request import FORWARDED, PEER, SERVICE, is_inference
from lmi_vllm.web.rerouting import ORIGINAL

# Hop-by-hop headers (RFC 9110, 7.6.1): of one connection; aiohttp writes its own.
_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding",
     "upgrade", "expect"}
)  # fmt: skip
# A stored response can be read again later, from the process that made it.
_STORED_RESPONSES: Final = "/v1/responses"
KEEPALIVE_SECONDS: Final = 2.0  # idle connections between two processes cost both of them tasks
_ORIGIN: Final = "http://first-process"  # the name is not looked up


def is_shared_route(request: web.Request) -> bool:
    """Whether any front-end process can answer the request by itself."""
    if request.method != "POST":
        return False
    if request.path == _STORED_RESPONSES or not is_inference(request):
        return False
    properties = request_properties(request.headers)
    is_bound = request.app[SERVICE].steps.is_process_bound
    return not any(is_kept_here(properties) for is_kept_here in is_bound)


class Forwarder:
    """Sends requests to the first process, over its Unix socket."""

    def __init__(self, path: str) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None),  # the first process has its own limits
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    def takes(self, request: web.Request) -> bool:
        """Whether the first process is to answer: no model is ready, or the route is not shared."""
        is_serving = request.app[SERVICE].lifecycle.is_serving
        return not (is_serving and is_shared_route(request))

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Return the first process's answer, written to the client while it arrives.

        Raises:
            NotReadyError: the first process does not answer.
            PayloadError: the body cannot be read.
            ResourceNotFoundError: the target is no path (`OPTIONS *`).
        """
        path = request.get(ORIGINAL) or request.rel_url.raw_path_qs
        if not path.startswith("/"):
            raise ResourceNotFoundError
        body = _Body(request)
        try:
            answer = await self._session.request(
                request.method,
                URL(_ORIGIN + path, encoded=True),
                headers=[*_request_headers(request.headers), (PEER, request.remote or "")],
                data=body.pieces() if request.can_read_body else None,
                allow_redirects=False,
            )
        except aiohttp.ClientError as error:
            if body.is_unreadable:
                raise PayloadError(UNREADABLE_BODY) from error
            raise NotReadyError("the first process of this server does not answer") from error
        async with answer:
            return await _relay(request, answer)


async def _relay(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    request[FORWARDED] = True
    response = web.StreamResponse(
        status=answer.status, reason=answer.reason, headers=_end_to_end_headers(answer.headers)
    )
    if answer.headers.get("Connection", "").lower() == "close":
        response.force_close()
    await response.prepare(request)
    try:
        async for piece in answer.content.iter_any():
            await response.write(piece)
    except (
        aiohttp.ClientPayloadError
    ):  # the first process is gone: the client must not take the rest for a complete answer
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


class _Body:
    """The body of a request, piece by piece, and whether it could be read."""

    def __init__(self, request: web.Request) -> None:
        self._content = request.content
        self.is_unreadable = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; sets `is_unreadable` when it cannot be read."""
        try:
            async for piece in self._content.iter_any():
                yield piece
        except web.RequestPayloadError:
            self.is_unreadable = True
            raise


def _request_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the headers to forward."""
    kept = _end_to_end_headers(headers)
    # Bytes that are not UTF-8 become question marks, as in `request_properties`.
    return [(name, value.encode("utf-8", "replace").decode()) for name, value in kept]


def _end_to_end_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    dropped = _HOP_BY_HOP | {PEER}
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]
