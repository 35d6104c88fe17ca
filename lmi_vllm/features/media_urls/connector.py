"""URLs of media in messages, which vLLM fetches from wherever they lead.

vLLM checks neither the addresses that a host resolves to nor the targets of redirects, and tries
three times with growing time limits (vllm/connections.py). Its connector gets our fetch by its own
registry. What it has fetched is decoded within the bounds of `decoded`.

Upstream: https://github.com/vllm-project/vllm/issues/57157.
Releases: 0.31 and later.
Shows: a URL is fetched from inside the network.
May go: when test_plain_vllm_fetches_media_from_inside_the_network fails.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

from lmi_vllm.engine.vllm.names import (
    MEDIA_CONNECTOR_REGISTRY,
    GracefulHTTPError,
    HTTPConnection,
    MediaConnector,
    VLLMValidationError,
    vllm_settings,
)
from lmi_vllm.engine.vllm.workarounds import has_name, replace
from lmi_vllm.features.media_urls.budget import MediaBusyError, MediaRefusedError
from lmi_vllm.features.media_urls.decoded import MediaBudget
from lmi_vllm.features.media_urls.fetch import MediaClient
from lmi_vllm.features.media_urls.tensors import guard_tensors
from lmi_vllm.messages import MediaPolicy

IMAGE_FORMATS: Final = "vllm.multimodal.image:ALLOWED_IMAGE_FORMATS"


class GuardedConnection(HTTPConnection):
    """Fetches media within a policy; the rest of vLLM's class is not used."""

    def __init__(self, fetch: MediaClient, policy: MediaPolicy, domains: tuple[str, ...]) -> None:
        super().__init__()
        self._fetch = fetch
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
            GracefulHTTPError: the server holds as much fetched media as it may.
        """
        try:
            content = await self._fetch(
                url,
                self._policy,
                self._domains,
                silence_seconds=timeout,
                max_bytes=max_bytes,
                follows_redirects=allow_redirects,
            )
        except MediaRefusedError as error:
            raise VLLMValidationError(str(error), parameter="url") from error
        except MediaBusyError as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error
        if request_budget is not None:
            request_budget.charge(len(content))
        return content

    def get_bytes(self, url: str, **options: Any) -> bytes:
        """Return the same for a caller without an event loop, or inside a running one."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self.async_get_bytes(url, **options)).result()


def guard_media(policy: MediaPolicy) -> None:
    """Make vLLM's handlers load media within `policy`; a user's own connector stays."""
    client = MediaClient()

    class GuardedConnector(MediaConnector):
        """What vLLM's request parsing makes for each request with media."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            domains = tuple(self.allowed_media_domains)
            self.connection = GuardedConnection(client, policy, domains)
            self._budget = MediaBudget(policy, vllm_settings.VLLM_MAX_AUDIO_DECODE_BYTES)

        def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
            """As vLLM's, within the budget."""
            with _client_errors(url):
                return super().load_from_url(url, self._budget.bound(media_io), **options)

        async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
            """As vLLM's, within the budget."""
            bound = self._budget.bound(media_io)
            with _client_errors(url):
                return await super().load_from_url_async(url, bound, **options)

    MEDIA_CONNECTOR_REGISTRY.register("http")(GuardedConnector)
    guard_tensors()
    if has_name(IMAGE_FORMATS):  # our list, so that no file is read as two formats
        replace(IMAGE_FORMATS, lambda _: policy.image_formats)


@contextmanager
def _client_errors(url: str) -> Iterator[None]:
    """Turn what vLLM raises of a URL that it does not open into the client's error."""
    try:
        yield
    except NotImplementedError as error:
        raise _not_opened("a data: URL needs ;base64") from error
    except (RuntimeError, OSError) as error:
        if url[:5].lower() != "file:":
            raise
        advice = "a file: URL needs option.allowed_local_media_path, and a file below it"
        raise _not_opened(advice) from error


def _not_opened(reason: str) -> VLLMValidationError:
    return VLLMValidationError(f"the media URL cannot be opened: {reason}", parameter="url")
