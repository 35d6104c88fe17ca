"""The golden answers of TGI's own routes: over HTTP, and by payload rules and formatters alone."""

from pathlib import Path

import pytest

from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.features.tgi.routes import GENERATE
from tests.conftest import ServeScripted
from tests.golden.cases import Golden, load_golden
from tests.golden.dialogues import Dialogue, load_dialogues
from tests.unit.inference.test_golden import is_generation, made_bytes
from tests.web.test_golden import answer_exactly

FOLDER = Path(__file__).parent
CASES = load_golden(FOLDER, GENERATE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_golden_answer_is_exact(
    serve: ServeScripted, engine: ScriptedEngine, case: Golden
) -> None:
    """Every example of the routes is answered with these bytes."""
    await answer_exactly(serve, engine, case)


@pytest.mark.parametrize("case", list(filter(is_generation, CASES)), ids=lambda case: case.name)
def test_golden_rows_are_exact(case: Golden) -> None:
    """Payload rules and formatters alone give the bytes that the server sends."""
    assert made_bytes(case) == case.body


@pytest.mark.parametrize(
    "dialogue", load_dialogues(FOLDER / "dialogues"), ids=lambda dialogue: dialogue.name
)
async def test_golden_dialogue_is_exact(serve: ServeScripted, dialogue: Dialogue) -> None:
    """What clients ask about the model is answered with these bytes."""
    await dialogue.check(await serve(dialogue.profile))
