"""Users' code that cannot be loaded ends the start."""

from pathlib import Path

import pytest

from tests.server.conftest import Engines, Serve


@pytest.mark.parametrize(
    ("text", "environ", "reason"),
    [
        ("def f(:\n", {}, "model.py, line 1: SyntaxError"),
        ("import nowhere\n", {}, "model.py, line 1: No module named 'nowhere'"),
        ("from djl_python import huggingface\n", {}, "line 1: No module named 'djl_python.hugg"),
        ("x = 1\n", {"OPTION_ENTRYPOINT": "other.py"}, "other.py does not exist"),
        ("x = 1\n", {"OPTION_ENTRYPOINT": "model.py"}, "has no function handle"),
        ("x = 1\n", {"OPTION_ENTRYPOINT": "model.py", "LMI_CUSTOM_CODE": "none"}, "forbids"),
    ],
    ids=["syntax", "import", "wrapped", "missing", "empty", "forbidden"],
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


FAULTS = {
    "import": "from djl_python import huggingface\n",
    "signature": (
        "from djl_python.output_formatter import output_formatter\n"
        "@output_formatter\ndef rows(a, b, c): ...\n"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_fault_that_the_text_shows_is_found_before_the_engine(
    serve: Serve, engines: Engines, tmp_path: Path, fault: str
) -> None:
    """No engine is started for a file that could never be called."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.py").write_text(FAULTS[fault], encoding="utf-8")
    code, said = await (await serve(model=str(tmp_path))).ended()
    assert (code, engines.started) == (1, [])
    assert "custom code cannot be loaded" in said.splitlines()[-1]
