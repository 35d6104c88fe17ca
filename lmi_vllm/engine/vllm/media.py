"""vLLM's media connector with our fetch below it (engine/media_fetch.py).

vLLM checks neither the addresses that a host resolves to nor the targets of redirects, and tries
three times with growing time limits (vllm/connections.py, 0.32).
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from lmi_vllm.engine.media_fetch import MediaRefusedError, fetch_media
from lmi_vllm.messages import MediaPolicy


class GuardedConnection(HTTPConnection):
    """Fetches media within a policy; everything else of vLLM's class stays unused."""

    def __init__(self, policy: MediaPolicy, domains: tuple[str, ...]) -> None:
        super().__init__()
        self._policy = policy
        self._domains = domains

    async def async_get_bytes(
        self,
        url: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's signature; the longest silence
        allow_redirects: bool = True,
        max_bytes: int | None = None,
        request_budget: Any = None,  # from vLLM 0.33: what all media of a request may weigh
    ) -> bytes:
        """Return the bytes at `url`.

        Raises:
            VLLMValidationError: they may not, or cannot, be fetched: the request's fault.
        """
        try:
            content = await fetch_media(
                url,
                self._policy,
                self._domains,
                silence_seconds=timeout,
                max_bytes=max_bytes,
                follows_redirects=allow_redirects,
            )
        except MediaRefusedError as error:
            raise VLLMValidationError(str(error), parameter="url") from error
        if request_budget is not None:
            request_budget.charge(len(content))
        return content

    def get_bytes(self, url: str, **options: Any) -> bytes:
        """Return the same to a caller without an event loop, or inside a running one."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self.async_get_bytes(url, **options)).result()


def guard_media(policy: MediaPolicy) -> None:
    """Make vLLM's handlers fetch media within `policy`; a connector of the user's own stays."""

    class GuardedConnector(MediaConnector):
        """What vLLM's request parsing makes for each request with media."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.connection = GuardedConnection(policy, tuple(self.allowed_media_domains))

    MEDIA_CONNECTOR_REGISTRY.register("http")(GuardedConnector)
