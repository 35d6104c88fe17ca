"""A start has compiled code kept where only this user can put it."""

import os
from pathlib import Path

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.server.conftest import Serve


async def test_compiled_code_gets_folders_of_this_user(serve: Serve, tmp_path: Path) -> None:
    """Torch and Triton find them before the engine is imported."""
    server = await (await serve(str(DEMO_MODEL_DIR), XDG_CACHE_HOME=str(tmp_path))).ready()
    assert server.exports["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/vllm/lmi_vllm/inductor"
    assert server.exports["TRITON_CACHE_DIR"] == f"{tmp_path}/vllm/lmi_vllm/triton"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
async def test_without_a_safe_folder_the_start_ends(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no compile cache is asked for: the last line says which variable to set."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for folder in (tmp_path / "home", tmp_path / f"lmi-vllm-cache-{os.geteuid()}"):
        folder.mkdir()
        os.chown(folder, 12345, 12345)
    server = await serve(str(DEMO_MODEL_DIR), XDG_CACHE_HOME=str(tmp_path / "home"))
    code, said = await server.ended()
    assert code == 1
    assert "no safe folder for compiled code" in said
    assert "set VLLM_CACHE_ROOT" in said
