"""The loaded custom code of one model: its own hooks, and those of its adapters."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from lmi_vllm.adapters.source import CODE_FILE
from lmi_vllm.config.listen import PROCESSES
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import AdapterRefusedError, LmiError
from lmi_vllm.features.custom_code.calling import CodeCaller
from lmi_vllm.features.custom_code.djl_python.inputs import Input
from lmi_vllm.features.custom_code.formatters import InputFormatter, OutputFormatter
from lmi_vllm.features.custom_code.functions import NO_FUNCTIONS, FileFunctions
from lmi_vllm.features.custom_code.handler import Handler
from lmi_vllm.features.custom_code.inspection import REGISTER
from lmi_vllm.features.custom_code.loading import CodeError, load_adapter_code
from lmi_vllm.features.custom_code.rolling_batch import TokenFormatter
from lmi_vllm.hooks import NO_HOOKS, Hooks
from lmi_vllm.messages import InferenceCall

logger = logging.getLogger(__name__)

ONE_PROCESS_ONLY: Final = (
    f"{CODE_FILE} would run in several processes: set {PROCESSES}=1, or LMI_CUSTOM_CODE=none"
)


class CustomCode:
    """The custom code of one model; loads the code of its adapters."""

    def __init__(
        self,
        functions: FileFunctions = NO_FUNCTIONS,
        caller: CodeCaller | None = None,
        *,
        is_one_process: bool = True,
        hand_over: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        self._hand_over = hand_over  # to SageMaker's library
        self._caller = caller or CodeCaller()
        self._handler = Handler(functions.handle, self._caller) if functions.handle else None
        self._adapters = functions.adapters
        self._is_one_process = is_one_process
        self.hooks = self._around_requests(functions, self._handler)

    async def load_adapter(self, name: str, path: str, options: Mapping[str, str]) -> Hooks:
        """Return the hooks in the adapter's model.py; NO_HOOKS without that file.

        The model's own `register_adapter` is called, and `unregister_adapter` when they are
        forgotten.

        Raises:
            AdapterRefusedError: its file cannot be loaded, or would run in several processes.
            CustomCodeError: the model's `register_adapter` failed.
        """
        hooks = await self._adapter_hooks(name, path)
        register, unregister = self._adapters.register, self._adapters.unregister
        if register is None and unregister is None:
            return hooks
        given = self._caller.input(InferenceCall(b""))
        given.properties |= {"name": name, "src": path}
        for key, value in options.items():
            given.content.add(key, value.encode())
        if register is not None:
            try:
                await self._caller.call(f"Adapter {name}: {REGISTER} failed", register, given)
            except LmiError:
                hooks.forget()
                raise
        return replace(hooks, forget=partial(self._forget, hooks, given))

    async def _adapter_hooks(self, name: str, path: str) -> Hooks:
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

    def _forget(self, hooks: Hooks, given: Input) -> None:
        """Remove an adapter's modules, and let the model's code know; it is not waited for."""
        hooks.forget()
        if self._adapters.unregister is not None:
            self._caller.thread.post(self._adapters.unregister, given)

    async def begin(self, engine: Engine) -> None:
        """Change its application, and call the handler once with an empty input.

        A failure of the handler is only logged.
        """
        self._hand_over(engine)
        if self._handler is None:
            return
        try:
            await self._handler.call_at_start()
        except LmiError as error:
            logger.warning("the handler's first call, with an empty input: %s", error.text)

    def _around_requests(self, functions: FileFunctions, handler: Handler | None = None) -> Hooks:
        """Return the functions of a file as the pipeline calls them."""
        to_payload, to_answer, caller = functions.input, functions.output, self._caller
        by_token = functions.tokens
        return Hooks(
            handler,
            None if to_payload is None else InputFormatter(to_payload, caller),
            None if to_answer is None else OutputFormatter(to_answer, caller),
            functions.forget,
            None if by_token is None else TokenFormatter(by_token, caller),
        )
