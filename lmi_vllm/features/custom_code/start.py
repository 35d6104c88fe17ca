"""The model's custom code at the start: finding its file, checking it and loading it."""

import copy
import logging
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from lmi_vllm.adapters.source import CODE_FILE
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import DownloadError, StartupError
from lmi_vllm.features.custom_code.calling import CodeCaller
from lmi_vllm.features.custom_code.functions import NO_FUNCTIONS, FileFunctions
from lmi_vllm.features.custom_code.loading import (
    CodeError,
    imported_from,
    inspect_code,
    load_model_code,
)
from lmi_vllm.features.custom_code.model_code import ONE_PROCESS_ONLY, CustomCode
from lmi_vllm.features.custom_code.sagemaker_library import hand_over, is_for_library
from lmi_vllm.features.custom_code.thread import CodeThread
from lmi_vllm.messages import ModelArtifacts, ServingProfile
from lmi_vllm.server.code_start import (
    formatter_function,
    warn_of_handlers,
    warn_of_unknown_formatter,
)
from lmi_vllm.sources.local import cache_directory

logger = logging.getLogger(__name__)

FETCH_SECONDS: Final = 60
REQUIREMENTS: Final = "requirements.txt"
_CODE_FOLDER: Final = "code"
MAX_FILE_BYTES: Final = 16 << 20


class CustomCodeLoader:
    """Loads the code that the settings name, the model's own and that of its adapters."""

    def check(
        self, settings: Settings, model: ModelArtifacts, environ: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Return warnings of the code, without executing it; see `CodeLoader.check`.

        Raises:
            StartupError: it would run in several processes, is not Python, or imports or defines
                what cannot work.
            DownloadError: an entry point cannot be fetched.
        """
        entry_point = settings.model.entry_point
        path = _local_file(settings, model.directory)
        if (path or entry_point) and not _is_one_process(settings):
            raise StartupError(f"custom code ({path or entry_point}): {ONE_PROCESS_ONLY}")
        if path is None and entry_point is not None and environ is not None:
            path = _fetch_entry_point(str(entry_point), environ)
        unread = _unread_folder(model.directory)
        if path is None:
            return unread
        # Packages of a requirements.txt are not installed before the fetch.
        has_packages = environ is None and (path.parent / REQUIREMENTS).is_file()
        formatter = formatter_function(settings.model.output_formatter)
        handler = settings.model.handler
        try:
            found = inspect_code(path, handler, formatter, has_packages=has_packages)
        except CodeError as error:
            raise StartupError(f"custom code cannot be loaded: {error}") from error
        return (*unread, *found)

    async def load(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        model: ModelArtifacts,
        profile: ServingProfile,
        engine: Engine,
    ) -> "CustomCode":
        """Return the user's code, imported and ready to call.

        Raises:
            StartupError: it cannot be imported, or lacks the function that the settings name.
        """
        thread = CodeThread()
        directory = model.directory
        functions = await _load(settings, environ, directory, thread)
        hook = functions.output or functions.tokens
        output = None if hook is None else hook.function
        warn_of_unknown_formatter(profile, getattr(output, "__name__", None))
        caller = CodeCaller(
            thread,
            copy.deepcopy(engine.tokenizer),  # vLLM's own is in use by other threads
            _properties(settings, model, directory or Path(model.model)),
            profile.predict_timeout,
        )
        is_one_process = _is_one_process(settings)
        if not is_one_process:
            warn_of_handlers(environ, ONE_PROCESS_ONLY)
            return CustomCode(functions, caller, is_one_process=False)
        path = _local_file(settings, directory)
        given = partial(hand_over, path=path, folder=directory, environ=environ)
        return CustomCode(functions, caller, hand_over=given)


async def _load(
    settings: Settings, environ: Mapping[str, str], directory: Path | None, thread: CodeThread
) -> FileFunctions:
    entry_point = settings.model.entry_point
    path = _local_file(settings, directory)
    if path is None and entry_point is not None:
        path = await thread.run(_fetch_entry_point, str(entry_point), environ)
    if path is None:
        return NO_FUNCTIONS
    handler = settings.model.handler
    formatter = formatter_function(settings.model.output_formatter)
    try:
        functions: FileFunctions = await thread.run(load_model_code, path, handler, formatter)
    except CodeError as error:
        raise StartupError(f"custom code cannot be loaded: {error}") from error
    if not functions and entry_point is not None and not is_for_library(imported_from(path)):
        raise StartupError(
            f"entryPoint {path}: it has no function {handler} and none that is decorated"
        )
    logger.info("custom code of %s: %s", path, _summary(functions))
    return functions


def _fetch_entry_point(url: str, environ: Mapping[str, str]) -> Path:
    """Return the local file of an http(s) URL, downloaded unless it is in the cache.

    Raises:
        DownloadError: it cannot be fetched; the text names URL and reason.
    """
    target = cache_directory(f"entry-point:{url}", environ) / "model.py"
    if target.is_file():
        return target
    try:
        with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer:
            content = answer.read(MAX_FILE_BYTES + 1)
    except urllib.error.HTTPError as error:  # a subclass of URLError whose text has the status
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


def _unread_folder(directory: Path | None) -> tuple[str, ...]:
    """Return a warning of SageMaker's `code/` in the model directory, which LMI ignores, too."""
    if directory is None:
        return ()
    names = ("model.py", "inference.py", REQUIREMENTS)
    found = [name for name in names if (directory / _CODE_FOLDER / name).is_file()]
    if not found:
        return ()
    folder = directory / _CODE_FOLDER
    return (f"{', '.join(found)} in {folder} is not read: put model.py and {REQUIREMENTS} into "
            f"{directory}, or name the file in option.entryPoint",)  # fmt: skip


def _is_one_process(settings: Settings) -> bool:
    """Whether there is one front-end process, so that custom code sees every request."""
    return settings.server.lmi_frontend_processes == 1


def _properties(settings: Settings, model: ModelArtifacts, directory: Path) -> Mapping[str, str]:
    """Return the properties of every `Input`: the options that are set, as text."""
    given = {
        name: str(setting.value)
        for name, setting in settings.model.details.items()
        if setting.is_set and setting.value is not None
    }
    return {"model_id": model.model, **given, "model_dir": str(directory)}


def _summary(functions: FileFunctions) -> str:
    properties = {
        "handler": functions.handle,
        "input hook": functions.input,
        "output hook": functions.output or functions.tokens,
    }
    return ", ".join(name for name, value in properties.items() if value) or "no hooks in it"
