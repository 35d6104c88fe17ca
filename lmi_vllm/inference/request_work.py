"""One admitted request at work: the model as it found it, and what it holds until its end."""

from dataclasses import dataclass, replace

from lmi_vllm.adapters.selection import ADAPTER_ALIAS_HEADER
from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.request.parameters import UnreadNames
from lmi_vllm.inference.request_hold import RequestHold
from lmi_vllm.inference.response.formatters import Framing, choose_framing
from lmi_vllm.inference.response.streams import HeldStream
from lmi_vllm.inference.runtime import Runtime
from lmi_vllm.messages import AdapterRef, InferenceCall, Reply
from lmi_vllm.telemetry.records import current_record


@dataclass(frozen=True, slots=True)
class RequestWork:
    """What every lane needs of the request it answers."""

    queue: RequestQueue
    runtime: Runtime
    call: InferenceCall
    hold: RequestHold
    unread_names: UnreadNames

    def part(self, position: int) -> "RequestWork":
        """Return the work for one element of a list: a request of its own in the engine."""
        return replace(
            self, call=replace(self.call, request_id=f"{self.call.request_id}-{position}")
        )

    def framing(self) -> Framing:
        """Return how a stream of this request is framed."""
        profile = self.runtime.profile
        default = None if self.call.tgi_route else profile.output_formatter
        return choose_framing(self.call.accept, default, tgi_compat=profile.tgi_compat)

    def admit_list(self, name: str, sequences: int) -> None:
        """Take the further places of a list: each sequence it asks for counts as a request.

        Raises:
            PayloadError: the list is longer than the queue.
            OverloadError: the queue has no room for it now.
        """
        if sequences > self.queue.limit:
            raise PayloadError(
                f"{name}: {sequences} sequences; job_queue_size allows {self.queue.limit}"
            )
        if sequences > 1:
            self.hold.enter_context(self.queue.admit(sequences - 1))

    async def adapter(self, name: str | None) -> AdapterRef | None:
        """Return the adapter, held until the request's end; None is the base model.

        Raises:
            UnknownAdapterError: no adapter of that name; never the base model instead.
            RequestError: it is registered, but cannot be loaded now.
        """
        alias = self.call.properties.get(ADAPTER_ALIAS_HEADER)
        adapter = await self.hold.adapter(self.runtime.adapters, name, alias)
        if adapter is None:
            return None
        if (record := current_record()) is not None:
            record.use_adapter(adapter.name)
        return adapter.ref

    def held(self, reply: Reply) -> Reply:
        """Move what is held into the reply's stream; without one it is released on return."""
        if reply.stream is None:
            return reply
        return replace(reply, stream=HeldStream(reply.stream, self.hold.pop_all()))
