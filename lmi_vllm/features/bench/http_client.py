"""Requests over plain HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from lmi_vllm.features.bench.dialects import Answer, ServerDialect
from lmi_vllm.features.bench.plan import LoadPlan, LoadRequest, RequestOutcome


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """The server, route, dialect and headers of the requests."""

    url: str  # without the path
    path: str
    dialect: ServerDialect
    model: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpClient:
    """Sends requests of one plan."""

    target: HttpTarget
    plan: LoadPlan
    session: aiohttp.ClientSession

    async def send(
        self, request: LoadRequest, outcome: RequestOutcome, now: Callable[[], float]
    ) -> None:
        """Send one request and read its answer; a failure is recorded in the outcome."""
        try:
            async with asyncio.timeout(self.plan.timeout_seconds):
                await self._send(request, outcome, now)
        except TimeoutError:
            outcome.fail("timeout", f"no whole answer within {self.plan.timeout_seconds:g} s")
        except aiohttp.ClientConnectorError as error:
            outcome.fail("cannot connect", str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            outcome.fail("connection cut", f"{type(error).__name__}: {error}")

    async def _send(
        self, request: LoadRequest, outcome: RequestOutcome, now: Callable[[], float]
    ) -> None:
        target = self.target
        body = target.dialect.body(request, self.plan, target.model)
        async with self.session.post(target.path, json=body) as response:
            if response.status != HTTPStatus.OK:
                outcome.fail(f"HTTP {response.status}", await response.text(errors="replace"))
                return
            answer = Answer(target.dialect, outcome, self.plan.is_streaming)
            async for piece in response.content.iter_any():
                answer.feed(piece, now())
            answer.end(now())


@asynccontextmanager
async def http_client(target: HttpTarget, plan: LoadPlan) -> AsyncIterator[HttpClient]:
    """Yield a client with any number of connections, which are closed at the end."""
    connector = aiohttp.TCPConnector(limit=0)
    no_limit = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        target.url, connector=connector, timeout=no_limit, headers=target.headers
    ) as session:
        yield HttpClient(target, plan, session)
