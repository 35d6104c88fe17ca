"""The factory of engines over Transformers, which is imported when the first of them is loaded."""

import asyncio

from lmi_vllm.engine.base import Engine, EngineClient
from lmi_vllm.engine.factory import imports_without_collections
from lmi_vllm.engine.vllm.cpu.companions import hide_unfit_companions
from lmi_vllm.engine.vllm.factory import import_failure
from lmi_vllm.messages import EngineArguments, ServingProfile


class TransformersFactory:
    """The factory of engines for encoder-decoder models."""

    reads_model = True

    def kind(self, arguments: EngineArguments) -> str:
        """Return the name of these engines."""
        return "transformers"

    async def load(self, arguments: EngineArguments) -> None:
        """Import the engine; see `EngineFactory.load`."""
        try:
            await asyncio.to_thread(_import)
        except ImportError as error:
            raise import_failure(error) from error

    async def start(
        self,
        arguments: EngineArguments,
        profile: ServingProfile,
        clients: tuple[EngineClient, ...] = (),
    ) -> Engine:
        """Load the model; see `EngineFactory.start`."""
        await asyncio.to_thread(
            _import
        )  # after a download, config.json may name this engine only now
        from lmi_vllm.features.seq2seq.engine import start_transformers_engine

        return await start_transformers_engine(arguments, profile)

    def abandon(self) -> None:
        """Do nothing, since there are no processes; see `EngineFactory.abandon`."""


def _import() -> None:
    with imports_without_collections():
        hide_unfit_companions()
