"""The code a start brings: which file it is, whether it may be loaded, and loading it."""

import copy
import logging
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lmi_vllm.adapters.registry import LoadCode
from lmi_vllm.config.listen import PROCESSES
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import AdapterRefusedError, DownloadError, StartupError
from lmi_vllm.inference.hooks.custom_code import CustomCode
from lmi_vllm.inference.hooks.functions import NO_HOOKS, Hooks
from lmi_vllm.inference.hooks.loading import CODE_FILE, CodeError, check_syntax, load_model_code
from lmi_vllm.inference.hooks.thread import CodeThread
from lmi_vllm.inference.response.formatters import FRAMINGS
from lmi_vllm.messages import ModelArtifacts, ServingProfile
from lmi_vllm.sources.storage import cache_directory

logger = logging.getLogger(__name__)

SWITCH: Final = "LMI_CUSTOM_CODE"
FETCH_SECONDS: Final = 60
MAX_FILE_BYTES: Final = 16 << 20
ONE_PROCESS_ONLY: Final = (
    f"{CODE_FILE} would run in several processes: set {PROCESSES}=1, or {SWITCH}=none"
)


def check_custom_code(settings: Settings, model: ModelArtifacts) -> None:
    """Return when nothing is known to be wrong with the code; nothing of it is run.

    Raises:
        StartupError: it is asked for and switched off, or it is not Python.
    """
    setting = settings.model.detail("entryPoint")
    entry_point = settings.model.entry_point
    if entry_point is not None and not _is_allowed(settings):
        origin = setting.origin if setting is not None else "entryPoint"
        raise StartupError(
            f"entryPoint ({origin}): {entry_point} is custom code, which {SWITCH}=none forbids"
        )
    path = _local_file(settings, model.directory)
    if not _is_allowed(settings):
        return
    if (path or entry_point) and not is_one_process(settings):
        raise StartupError(f"custom code ({path or entry_point}): {ONE_PROCESS_ONLY}")
    if path is None:
        return
    try:
        check_syntax(path)
    except CodeError as error:
        raise StartupError(str(error)) from error


def adapter_code(settings: Settings, code: CustomCode) -> LoadCode:
    """Return what loads the code that adapters bring, or refuses it."""

    async def refuse(name: str, path: str) -> Hooks:
        if (Path(path) / CODE_FILE).is_file() and _is_allowed(settings):
            raise AdapterRefusedError(f"Adapter {name}: {ONE_PROCESS_ONLY}")
        return await code.load_adapter(name, path)

    return code.load_adapter if is_one_process(settings) else refuse


def is_one_process(settings: Settings) -> bool:
    """Whether custom code finds one process, whose state is all there is."""
    return settings.server.lmi_frontend_processes == 1


async def load_custom_code(
    settings: Settings,
    environ: Mapping[str, str],
    model: ModelArtifacts,
    profile: ServingProfile,
    engine: Engine,
) -> CustomCode:
    """Return the user's code, imported: after the engine has started, so that no fork copies it.

    Raises:
        StartupError: it cannot be imported, or lacks the function that the settings name.
    """
    thread = CodeThread()
    directory = model.directory
    hooks = NO_HOOKS
    if _is_allowed(settings):
        hooks = await _load(settings, environ, directory, thread)
    elif directory is not None and (directory / CODE_FILE).is_file():
        logger.warning("%s is not loaded: %s=none", directory / CODE_FILE, SWITCH)
    _warn_of_unknown_formatter(profile, hooks)
    return CustomCode(
        hooks,
        thread=thread,
        tokenizer=copy.deepcopy(engine.tokenizer),  # vLLM's own is in use by other threads
        properties=_properties(settings, model, directory or Path(model.model)),
        allows_adapters=_is_allowed(settings),
        timeout_seconds=profile.predict_timeout,
    )


async def _load(
    settings: Settings, environ: Mapping[str, str], directory: Path | None, thread: CodeThread
) -> Hooks:
    entry_point = settings.model.entry_point
    path = _local_file(settings, directory)
    if path is None and entry_point is not None:
        path = await thread.run(_fetch_entry_point, str(entry_point), environ)
    if path is None:
        return NO_HOOKS
    handler = str(settings.model.handler or "handle")
    formatter = _formatter_name(settings.model.output_formatter)
    try:
        hooks: Hooks = await thread.run(load_model_code, path, handler, formatter)
    except CodeError as error:
        raise StartupError(f"custom code cannot be loaded: {error}") from error
    if not hooks and entry_point is not None:
        raise StartupError(
            f"entryPoint {path}: it has no function {handler} and none that is decorated"
        )
    logger.info("custom code of %s: %s", path, _summary(hooks))
    return hooks


def _fetch_entry_point(url: str, environ: Mapping[str, str]) -> Path:
    """Return the file of an http(s) URL, from the cache if it is there.

    Raises:
        DownloadError: it cannot be fetched; the text names URL and reason.
    """
    target = cache_directory(f"entry-point:{url}", environ) / "model.py"
    if target.is_file():
        return target
    try:
        with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer:
            content = answer.read(MAX_FILE_BYTES + 1)
    except urllib.error.HTTPError as error:  # a kind of URLError; its own text has the status
        raise _cannot_be_fetched(url, error) from error
    except urllib.error.URLError as error:
        raise _cannot_be_fetched(url, error.reason) from error
    except (OSError, ValueError) as error:
        raise _cannot_be_fetched(url, error) from error
    if len(content) > MAX_FILE_BYTES:
        raise DownloadError(f"entryPoint {mask_urls(url)} is larger than {MAX_FILE_BYTES} bytes")
    target.parent.mkdir(parents=True, exist_ok=True)
    file, name = tempfile.mkstemp(dir=target.parent, prefix=".entry-point-")
    with os.fdopen(file, "wb") as partial:
        partial.write(content)
    Path(name).rename(target)
    return target


def _cannot_be_fetched(url: str, reason: object) -> DownloadError:
    return DownloadError(f"entryPoint {mask_urls(url)} cannot be fetched: {reason}")


def _local_file(settings: Settings, directory: Path | None) -> Path | None:
    """Return the file that holds the code, None where there is none (yet)."""
    name = settings.model.entry_point
    if isinstance(name, str) and name.startswith(("http://", "https://")):
        return None
    if directory is None and not (isinstance(name, str) and Path(name).is_absolute()):
        return None
    path = (directory or Path("/")) / (str(name) if name is not None else CODE_FILE)
    return path.absolute() if path.is_file() else None


def _is_allowed(settings: Settings) -> bool:
    return settings.server.lmi_custom_code != "none"


def _formatter_name(value: object) -> str | None:
    return str(value) if value is not None and str(value) not in FRAMINGS else None


def _warn_of_unknown_formatter(profile: ServingProfile, hooks: Hooks) -> None:
    name = _formatter_name(profile.output_formatter)
    found = hooks.output.function if hooks.output is not None else None
    if name is not None and getattr(found, "__name__", None) != name:
        logger.warning(
            "output_formatter %s is neither json, jsonlines, sse nor a function of %s: it counts "
            "as unset",
            name,
            CODE_FILE,
        )


def _properties(settings: Settings, model: ModelArtifacts, directory: Path) -> Mapping[str, str]:
    """Return what a handler finds among its properties: the options that are set, as text."""
    given = {
        name: str(setting.value)
        for name, setting in settings.model.details.items()
        if setting.is_set and setting.value is not None
    }
    return {"model_id": model.model, **given, "model_dir": str(directory)}


def _summary(hooks: Hooks) -> str:
    found = {"handler": hooks.handle, "input hook": hooks.input, "output hook": hooks.output}
    return ", ".join(name for name, value in found.items() if value) or "no hooks in it"
