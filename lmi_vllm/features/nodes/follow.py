"""`serve` on a follower: no port, only vLLM's workers, which end with the leader.

vLLM's own headless ranks outlive their leader. The leader's first worker keeps torch's rendezvous
store open for as long as it lives. So an idle connection to the store is the liveness check. It
also ends when the leader's engine restarts, because these workers cannot join the new one.
"""

import asyncio
import logging
from collections.abc import Mapping, MutableMapping

from lmi_vllm.clock import Clock
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.engine.vllm.forks import new_engine_thread
from lmi_vllm.errors import LmiError
from lmi_vllm.features.nodes.cluster import follows, node_rank
from lmi_vllm.features.nodes.liveness import Follower
from lmi_vllm.server.context import (
    ModelContext,
    ProcessGroup,
    ServerContext,
    ServerEvents,
    new_service,
)
from lmi_vllm.server.model_settings import planned
from lmi_vllm.server.model_start import ModelStart
from lmi_vllm.server.parts import Assembled, RunMode
from lmi_vllm.server.plan import StartPlan
from lmi_vllm.telemetry.log_handler import print_lines

logger = logging.getLogger(__name__)

WORKER_ENDED = "a worker process of this node died"
CUT_OFF_ANSWER_SECONDS = 5.0  # the workers may notice the leader's end first


def follower(settings: Settings) -> RunMode | None:
    """Return `follow` for a follower; None for a leader, and for a node alone."""
    return follow if follows(settings) else None


async def follow(  # noqa: PLR0913, PLR0917 - as the server is made
    assembled: Assembled,
    settings: Settings,
    typed: CommandLine,
    environ: Mapping[str, str],
    engine_factory: EngineFactory,
    exports: MutableMapping[str, str],
    stop: asyncio.Event,
) -> tuple[int, str]:
    """Run this node's workers; returns the exit code, and the reason of a failure or "".

    The code is 0 when `stop` is set and when the leader ended, which reports its own failure.
    """
    configuration, clock = assembled.configuration, Clock()
    service = new_service(settings, clock)
    context = ServerContext(
        configuration, assembled.parts.start, service, environ, exports, engine_factory,
        ProcessGroup(), clock, ServerEvents(),
    )  # fmt: skip
    life = asyncio.create_task(_serve_leader(context, settings, typed))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({life, stopping}, return_when=asyncio.FIRST_COMPLETED)
    return life.result() if life.done() else (0, "")


async def _serve_leader(
    context: ServerContext, settings: Settings, typed: CommandLine
) -> tuple[int, str]:
    try:
        plan, settings = await planned(context, settings, typed)
        if plan is None:
            return 1, "a node of a cluster needs the model: set HF_MODEL_ID"
        return await _run_workers(context, settings, plan)
    except LmiError as error:
        return 1, error.text


async def _run_workers(
    context: ServerContext, settings: Settings, plan: StartPlan
) -> tuple[int, str]:
    model = ModelContext(  # requests reach the leader: no part of a feature is needed here
        context.service, settings, plan.arguments, context.environ, context.configuration.sources
    )
    ready = await ModelStart(context, model, plan).prepare()
    thread = new_engine_thread()
    follower = Follower(ready.arguments)
    leader = ready.arguments.values["master_addr"]
    seconds = settings.model.model_loading_timeout
    try:
        async with asyncio.timeout(seconds or None):
            await asyncio.get_running_loop().run_in_executor(thread, follower.start)
    except TimeoutError:
        return 1, f"the leader {leader} was not met within model_loading_timeout ({seconds:g} s)"
    nodes = ready.arguments.values["nnodes"]
    print_lines(f"Following {leader} as node {node_rank(ready.arguments)} of {nodes}")
    workers = asyncio.create_task(asyncio.to_thread(follower.wait_for_workers))
    leading = asyncio.create_task(asyncio.to_thread(follower.wait_for_leader))
    await asyncio.wait({workers, leading}, return_when=asyncio.FIRST_COMPLETED)
    if workers.done():
        logger.error(WORKER_ENDED)
        follower.leave()
    await asyncio.wait({leading}, timeout=CUT_OFF_ANSWER_SECONDS)
    if leading.done():
        logger.info("the leader %s has gone: this node ends", leader)
        return 0, ""
    return 1, WORKER_ENDED
