"""Users' code that cannot be loaded ends the start."""

from pathlib import Path

import pytest

from tests.server.conftest import Engines, Serve


@pytest.mark.parametrize(
    ("text", "environ", "reason"),
    [
        ("def f(:\n", {}, "model.py, line 1: SyntaxError"),
        ("import nowhere\n", {}, "model.py, line 1: ModuleNotFoundError: No module named"),
        ("x = 1\n", {"OPTION_ENTRYPOINT": "other.py"}, "other.py does not exist"),
        ("x = 1\n", {"OPTION_ENTRYPOINT": "model.py"}, "has no function handle"),
        ("x = 1\n", {"OPTION_ENTRYPOINT": "model.py", "LMI_CUSTOM_CODE": "none"}, "forbids"),
    ],
    ids=["syntax", "import", "missing", "empty", "forbidden"],
)
async def test_broken_code_ends_the_start(
    serve: Serve, engines: Engines, tmp_path: Path, text: str, environ: dict[str, str], reason: str
) -> None:
    """Exit code 1, and the last line says which file, which line and why."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.py").write_text(text, encoding="utf-8")
    server = await serve(model=str(tmp_path), **environ)
    code, said = await server.ended()
    assert code == 1
    assert reason in said.splitlines()[-1]
    assert all(engine.is_closed for engine in engines.started)
