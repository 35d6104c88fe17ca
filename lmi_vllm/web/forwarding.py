"""What a further front-end process does not answer itself goes to the first one, byte by byte.

It answers inference: each of those requests is work that processes can share. Health, metrics,
adapters, models, the console, stored responses and answers that are read later belong to one place.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Final

import aiohttp
from aiohttp import web
from yarl import URL

from lmi_vllm.errors import NotReadyError
from lmi_vllm.inference.deferred import STARTING_TOKEN, is_deferred
from lmi_vllm.web.inference_routes import request_properties
from lmi_vllm.web.keys import FORWARDED
from lmi_vllm.web.route_families import OPENAI_ROUTES, TGI_PATHS

# Of one connection, not of the message (RFC 9110, 7.6.1); aiohttp writes its own.
_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding",
     "upgrade", "expect"}
)  # fmt: skip
_INFERENCE: Final = frozenset(
    {"/invocations", *TGI_PATHS, *OPENAI_ROUTES} - {"/info", "/v1/models", "/v1/responses"}
)
_OF_PACKED_BODY: Final = frozenset({"content-encoding", "content-length"})
KEEPALIVE_SECONDS: Final = 2.0  # idle connections between two processes cost both of them tasks
_ORIGIN: Final = "http://first-process"  # nobody looks the name up


def is_shared_work(request: web.Request) -> bool:
    """Whether any front-end process can answer the request by itself."""
    if request.method != "POST":
        return False
    path = request.path
    is_inference = path in _INFERENCE or path.startswith("/predictions/")
    if not is_inference and not path.endswith("/invoke"):
        return False
    properties = request_properties(request.headers)
    return not is_deferred(properties) and STARTING_TOKEN not in properties


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

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Return the first process's answer, which is written while it arrives."""
        request[FORWARDED] = True
        try:
            answer = await self._session.request(
                request.method,
                URL(_ORIGIN + request.raw_path, encoded=True),
                headers=_asked(request.headers),
                data=_body(request) if request.can_read_body else None,
                allow_redirects=False,
            )
        except aiohttp.ClientError as error:
            raise NotReadyError("the first process of this server does not answer") from error
        async with answer:
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=_kept(answer.headers)
            )
            if answer.headers.get("Connection", "").lower() == "close":
                response.force_close()
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


async def _body(request: web.Request) -> AsyncIterator[bytes]:
    async for piece in request.content.iter_any():
        yield piece


def _asked(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the headers of a request; its body has been unpacked where it was packed."""
    kept = _kept(headers)
    if "Content-Encoding" in headers:
        kept = [pair for pair in kept if pair[0].lower() not in _OF_PACKED_BODY]
    # Bytes that are no text become question marks, as in `request_properties`.
    return [(name, value.encode("utf-8", "replace").decode()) for name, value in kept]


def _kept(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP]
