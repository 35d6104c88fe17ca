"""The model's code in a start: which file it is, whether it can be loaded, and loading it."""

import copy
import logging
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lmi_vllm.adapters.source import CODE_FILE
from lmi_vllm.config.listen import PROCESSES
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import AdapterRefusedError, DownloadError, LmiError, StartupError
from lmi_vllm.extras.custom_code.calling import CodeCaller
from lmi_vllm.extras.custom_code.formatters import InputFormatter, OutputFormatter
from lmi_vllm.extras.custom_code.functions import NO_FUNCTIONS, FileFunctions
from lmi_vllm.extras.custom_code.handler import Handler
from lmi_vllm.extras.custom_code.loading import (
    CodeError,
    check_syntax,
    load_adapter_code,
    load_model_code,
)
from lmi_vllm.extras.custom_code.thread import CodeThread
from lmi_vllm.inference.hooks import NO_HOOKS, Hooks
from lmi_vllm.messages import ModelArtifacts, ServingProfile
from lmi_vllm.server.code_start import formatter_function, warn_of_unknown_formatter
from lmi_vllm.sources.storage import cache_directory

logger = logging.getLogger(__name__)

FETCH_SECONDS: Final = 60
MAX_FILE_BYTES: Final = 16 << 20
ONE_PROCESS_ONLY: Final = (
    f"{CODE_FILE} would run in several processes: set {PROCESSES}=1, or LMI_CUSTOM_CODE=none"
)


class CustomCodeLoader:
    """Loads the code that the settings name, the model's own and that of its adapters."""

    def check(self, settings: Settings, model: ModelArtifacts) -> None:
        """Return when nothing is known to be wrong with the code; nothing of it is run.

        Raises:
            StartupError: it would run in several processes, or it is not Python.
        """
        entry_point = settings.model.entry_point
        path = _local_file(settings, model.directory)
        if (path or entry_point) and not _is_one_process(settings):
            raise StartupError(f"custom code ({path or entry_point}): {ONE_PROCESS_ONLY}")
        if path is None:
            return
        try:
            check_syntax(path)
        except CodeError as error:
            raise StartupError(str(error)) from error

    async def load(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        model: ModelArtifacts,
        profile: ServingProfile,
        engine: Engine,
    ) -> "CustomCode":
        """Return the user's code, imported.

        Raises:
            StartupError: it cannot be imported, or lacks the function that the settings name.
        """
        thread = CodeThread()
        directory = model.directory
        functions = await _load(settings, environ, directory, thread)
        output = functions.output.function if functions.output is not None else None
        warn_of_unknown_formatter(profile, getattr(output, "__name__", None))
        caller = CodeCaller(
            thread,
            copy.deepcopy(engine.tokenizer),  # vLLM's own is in use by other threads
            _properties(settings, model, directory or Path(model.model)),
            profile.predict_timeout,
        )
        return CustomCode(functions, caller, is_one_process=_is_one_process(settings))


class CustomCode:
    """All code of one model: its own is here, and what adapters bring is loaded here."""

    def __init__(
        self,
        functions: FileFunctions = NO_FUNCTIONS,
        caller: CodeCaller | None = None,
        *,
        is_one_process: bool = True,
    ) -> None:
        self._caller = caller or CodeCaller()
        self._handler = Handler(functions.handle, self._caller) if functions.handle else None
        self._is_one_process = is_one_process
        self.hooks = self._around_requests(functions, self._handler)

    async def load_adapter(self, name: str, path: str) -> Hooks:
        """Return the hooks that the adapter brings; none without a file.

        Raises:
            AdapterRefusedError: its file cannot be loaded, or would run in several processes.
        """
        if not (Path(path) / CODE_FILE).is_file():
            return NO_HOOKS
        if not self._is_one_process:
            raise AdapterRefusedError(f"Adapter {name}: {ONE_PROCESS_ONLY}")
        try:
            functions = await self._caller.thread.run(load_adapter_code, Path(path))
        except CodeError as error:
            raise AdapterRefusedError(
                f"Adapter {name}: its custom code cannot be loaded: {error}"
            ) from error
        return self._around_requests(functions)

    async def call_handler_at_start(self) -> None:
        """Give the handler its first call, with an empty input; its failure is only logged."""
        if self._handler is None:
            return
        try:
            await self._handler.call_at_start()
        except LmiError as error:
            logger.warning("the handler's first call, with an empty input: %s", error.text)

    def _around_requests(self, functions: FileFunctions, handler: Handler | None = None) -> Hooks:
        """Return the functions of a file as the pipeline calls them."""
        to_payload, to_answer, caller = functions.input, functions.output, self._caller
        return Hooks(
            handler,
            None if to_payload is None else InputFormatter(to_payload, caller),
            None if to_answer is None else OutputFormatter(to_answer, caller),
            functions.forget,
        )


async def _load(
    settings: Settings, environ: Mapping[str, str], directory: Path | None, thread: CodeThread
) -> FileFunctions:
    entry_point = settings.model.entry_point
    path = _local_file(settings, directory)
    if path is None and entry_point is not None:
        path = await thread.run(_fetch_entry_point, str(entry_point), environ)
    if path is None:
        return NO_FUNCTIONS
    handler = str(settings.model.handler or "handle")
    formatter = formatter_function(settings.model.output_formatter)
    try:
        functions: FileFunctions = await thread.run(load_model_code, path, handler, formatter)
    except CodeError as error:
        raise StartupError(f"custom code cannot be loaded: {error}") from error
    if not functions and entry_point is not None:
        raise StartupError(
            f"entryPoint {path}: it has no function {handler} and none that is decorated"
        )
    logger.info("custom code of %s: %s", path, _summary(functions))
    return functions


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


def _is_one_process(settings: Settings) -> bool:
    """Whether custom code finds one process, whose state is all there is."""
    return settings.server.lmi_frontend_processes == 1


def _properties(settings: Settings, model: ModelArtifacts, directory: Path) -> Mapping[str, str]:
    """Return what a handler finds among its properties: the options that are set, as text."""
    given = {
        name: str(setting.value)
        for name, setting in settings.model.details.items()
        if setting.is_set and setting.value is not None
    }
    return {"model_id": model.model, **given, "model_dir": str(directory)}


def _summary(functions: FileFunctions) -> str:
    found = {
        "handler": functions.handle,
        "input hook": functions.input,
        "output hook": functions.output,
    }
    return ", ".join(name for name, value in found.items() if value) or "no hooks in it"
