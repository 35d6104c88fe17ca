"""Sessions of a server: their directory, the request step, the copy to S3 at the end."""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import DownloadError, LmiError, StartupError
from lmi_vllm.features.sessions.sessions import (
    SESSION_PROPERTY,
    Sessions,
    SharedSessions,
    is_session_request,
    shared_sessions,
)
from lmi_vllm.features.sessions.settings import DEFAULT_ROOT, SessionSettings
from lmi_vllm.inference.context import ModelSteps, RequestContext
from lmi_vllm.messages import GENERATE, InferenceCall, Reply
from lmi_vllm.server.context import ModelContext
from lmi_vllm.sources.table import Sources
from lmi_vllm.sources.trusted_folders import (
    per_user_sibling,
    trusted_folder,
    untrusted_folder_reason,
)

logger = logging.getLogger(__name__)

COPY_SECONDS: Final = 8.0
_FOLDER: Final = "the directory of sessions"


@contextlib.asynccontextmanager
async def keeping_sessions(model: ModelContext) -> AsyncIterator[None]:
    """Keep sessions as the settings of the model ask for it; copied while the engine ends."""
    environ, sources = model.environ, model.sources
    url = model.settings.feature(SessionSettings).sessions_s3url
    sessions = sessions_of(model.settings, shared_sessions(url, environ, sources))
    copies = list[asyncio.Task[None]]()

    async def copy() -> None:
        copies.append(asyncio.create_task(copy_sessions(sessions, url, environ, sources)))

    SessionStep(sessions).add_to(model.steps)
    if model.is_first:
        model.on_drained.append(copy)
    yield
    await asyncio.gather(*copies)


class SessionStep:
    """Checks the session that a request names, and answers those that are about a session."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions

    def add_to(self, steps: ModelSteps) -> None:
        """Answer the requests that these steps are for."""
        steps.checks.append(self.check)
        steps.answers.append(self.answer)

    async def check(self, call: InferenceCall) -> None:
        """Raise `PayloadError` where the request names an unknown session."""
        if SESSION_PROPERTY in call.properties:
            await self.sessions.check(call.properties)

    async def answer(self, context: RequestContext, payload: Mapping[str, Any]) -> Reply | None:
        """Create or close a session; None for every other payload."""
        if context.runtime.profile.task != GENERATE or not is_session_request(payload):
            return None
        return await self.sessions.answer(payload, context.call.properties)


def sessions_of(settings: Settings, shared: SharedSessions | None = None) -> Sessions:
    """Return the sessions of these settings; where enabled, their directory is created.

    Raises:
        StartupError: the directory of the option cannot be created or written, or none is
            safe from other users.
    """
    asked = settings.feature(SessionSettings)
    is_enabled, setting = asked.enable_stateful_sessions, asked.details.sessions_path
    root = Path(asked.sessions_path).absolute()
    if not setting.is_set:
        # /dev/shm is missing on some systems, and may belong to another user.
        if not os.access(root.parent, os.W_OK):
            root = Path(tempfile.gettempdir()) / DEFAULT_ROOT.name
        if is_enabled:
            root = trusted_folder(root, per_user_sibling(root), _FOLDER, "option.sessions_path")
    elif is_enabled:
        _check(root, setting)
    return Sessions(root, asked.sessions_expiration, is_enabled=is_enabled, shared=shared)


async def copy_sessions(
    sessions: Sessions, url: str | None, environ: Mapping[str, str], sources: Sources
) -> None:
    """Copy the directory to `url`, where there is one; a failure is only logged."""
    if not url or not sessions.root.is_dir():
        return
    shown = mask_urls(url)
    upload = asyncio.to_thread(_copy, sessions, url, environ, sources)
    try:
        count = await asyncio.wait_for(upload, COPY_SECONDS)
    except TimeoutError:
        logger.error("sessions are NOT all at %s: %g s were not enough", shown, COPY_SECONDS)
    except asyncio.CancelledError:
        logger.error("sessions are NOT all at %s: the server's end has no time left", shown)
        raise
    except (LmiError, OSError) as error:
        logger.error("sessions could NOT be copied to %s: %s", shown, error)
    else:
        logger.info("copied %d session files to %s", count, shown)


def _copy(sessions: Sessions, url: str, environ: Mapping[str, str], sources: Sources) -> int:
    sessions.remove_closed()  # else the copy would restore them
    return upload_directory(sessions.root, url, environ, sources)


def upload_directory(
    directory: Path, url: str, environ: Mapping[str, str], sources: Sources
) -> int:
    """Copy every file below `directory` to the store at `url`, and return how many.

    Raises:
        DownloadError: the store refuses, or `url` names none.
        UnreachableError: the store does not answer.
    """
    place = sources.store_of(url.strip())
    if place is None:
        raise DownloadError(f"{url} {sources.unclaimed_reason()}")
    store = place.make_store(url.strip(), environ)
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    for path in files:
        store.upload(path.relative_to(directory).as_posix(), path)
    return len(files)


def _check(root: Path, setting: Setting) -> None:
    origin = setting.origin
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"sessions_path ({origin}): {root}: {error.strerror}") from error
    if not os.access(root, os.W_OK):
        raise StartupError(f"sessions_path ({origin}): {root} cannot be written")
    if reason := untrusted_folder_reason(root, _FOLDER):
        logger.warning("sessions_path (%s): %s", origin, reason)
