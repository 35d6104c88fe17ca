"""What every part of one server works with; made once, handed to all of them."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from lmi_vllm.clock import Clock
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.process_group import ProcessGroup


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The parts that live as long as the server, whatever model it has.

    `environ` are the variables as the server got them; `exports` is where libraries, and the
    processes they start, read theirs: os.environ, but for tests.
    """

    service: InferenceService
    environ: Mapping[str, str]
    exports: MutableMapping[str, str]
    engine_factory: EngineFactory
    processes: ProcessGroup
    clock: Clock
