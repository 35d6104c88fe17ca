"""The one thread that runs the model: between two steps of the batch, requests join and leave.

A sequence joins as soon as a row is free and leaves with its last token. No request waits for a
whole batch, and none for another's list (`waiting.py`). An error in a step ends the engine, as the
death of vLLM's process does: running and later requests get `EngineDeadError`.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Final

import torch

from lmi_vllm.errors import EngineDeadError
from lmi_vllm.features.metrics import ENGINE_SEQUENCES
from lmi_vllm.features.seq2seq.batch import Delivery, RunningBatch, StepRequest
from lmi_vllm.features.seq2seq.model import LoadedModel
from lmi_vllm.features.seq2seq.text import TokenTexts
from lmi_vllm.features.seq2seq.waiting import WaitingSequences

logger = logging.getLogger(__name__)

MAX_JOINS_PER_STEP: Final = 4  # a burst of new requests must not stall the running ones


class StepThread:
    """Runs requests on one model in a thread; call all but `run` and `stop` on the event loop."""

    def __init__(
        self, loaded: LoadedModel, texts: TokenTexts, max_rows: int, seed: int | None
    ) -> None:
        self.progress = 0
        self.dead = asyncio.Event()
        self.death = ""  # why, if a step has failed
        self._batch = RunningBatch(loaded, texts, seed, self._close)
        self._waiting = WaitingSequences(max_rows)
        self._requests: set[StepRequest] = set()
        self._condition = threading.Condition()
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self.run, name="transformers-steps", daemon=True)
        self._thread.start()

    @property
    def requests(self) -> int:
        """Number of requests that run or wait."""
        return len(self._requests)

    def submit(self, request: StepRequest) -> None:
        """Queue a request.

        Raises:
            EngineDeadError: the thread has ended.
        """
        with self._condition:
            if self._is_over:
                raise EngineDeadError
            request.open_sequences = request.sampling.n
            self._requests.add(request)
            self._waiting.add(request)
            self._condition.notify()

    def abort(self, request: StepRequest) -> None:
        """Remove a request before the next step; one that has ended is ignored."""
        with self._condition:
            request.is_aborted = True
            self._condition.notify()

    def stop(self, seconds: float) -> bool:
        """End the thread after its step; returns whether it ended in time."""
        with self._condition:
            self._is_over = True
            self._condition.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def declare_dead(self) -> None:
        """End all requests with EngineDeadError, without the thread, which may hang in a step."""
        with self._condition:
            self._is_over = True
            left = [request for request in self._requests if not request.is_aborted]
            self._requests.clear()
            self._waiting.clear()
        self.dead.set()
        for request in left:
            request.deliver(EngineDeadError())

    def run(self) -> None:
        """Run steps until `stop` is called or a step fails."""
        try:
            with torch.inference_mode():
                while self._has_work():
                    self._run_step()
            self._finish(is_death=False)
        except BaseException as error:
            logger.exception("the step loop of the Transformers engine failed")
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self.death = f"a step of the Transformers engine failed: {text}"
            self._finish(is_death=True)

    def _has_work(self) -> bool:
        """Wait until there is a request to run; returns False once the thread is to end."""
        with self._condition:
            self._update_gauges()
            self._condition.wait_for(self._is_wanted)
            self._drop_aborted()
            self._update_gauges()
            return not self._is_over

    def _is_wanted(self) -> bool:
        if self._is_over or self._batch or self._waiting:
            return True
        return any(request.is_aborted for request in self._requests)  # one that has failed

    def _update_gauges(self) -> None:
        ENGINE_SEQUENCES.labels("running").set(len(self._batch))
        ENGINE_SEQUENCES.labels("waiting").set(len(self._waiting))

    def _drop_aborted(self) -> None:
        gone = {request for request in self._requests if request.is_aborted}
        if not gone:
            return
        self._waiting.keep(lambda request: request not in gone)
        self._batch.drop(gone)
        self._requests -= gone

    def _run_step(self) -> None:
        """Run one step of the batch, then let waiting sequences join."""
        ready = list(self._batch.step())
        for _ in range(MAX_JOINS_PER_STEP):
            if (joining := self._next_waiting()) is None:
                break
            ready += self._batch.join(*joining)
        self.progress += 1
        if ready:
            self._loop.call_soon_threadsafe(_deliver_all, ready)

    def _next_waiting(self) -> tuple[StepRequest, int] | None:
        with self._condition:
            return self._waiting.take(self._batch.owners)

    def _close(self, request: StepRequest) -> None:
        with self._condition:
            self._requests.discard(request)

    def _finish(self, *, is_death: bool) -> None:
        """End the requests that are left with an error, and release the model."""
        with self._condition:
            self._is_over = True
            left = [request for request in self._requests if not request.is_aborted]
            self._requests.clear()
            self._waiting.clear()
        self._batch.clear()
        self._update_gauges()

        def notify_requests() -> None:
            if is_death:
                self.dead.set()
            for request in left:
                request.deliver(EngineDeadError())

        with contextlib.suppress(RuntimeError):  # the event loop has closed: no request is left
            self._loop.call_soon_threadsafe(notify_requests)


def _deliver_all(ready: Sequence[Delivery]) -> None:
    for deliver, item in ready:
        deliver(item)
