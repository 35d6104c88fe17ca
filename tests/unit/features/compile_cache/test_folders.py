"""Compiled code lies where only this user can put it, with or without a compile cache."""

import os
import stat
from pathlib import Path

import pytest

from lmi_vllm.errors import StartupError
from lmi_vllm.features.compile_cache.folders import compiled_code_exports, compiled_code_folder
from lmi_vllm.features.compile_cache.start import kept_code
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.server.start_parts import PlannedStart
from tests.support.assembled import SOURCES, load_settings
from tests.unit.conftest import OTHER_USER, of_other_user

BELOW_OURS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "QUACK_CACHE_DIR": "quack",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
}
BELOW_HOME = {
    "FLASHINFER_WORKSPACE_BASE",
    "CUDA_CACHE_PATH",
    "TVM_FFI_CACHE_DIR",
    "TRTLLM_DG_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "HUMMING_CACHE_DIR",
    "CUPY_CACHE_DIR",
}
BELOW_CACHES = {"TORCH_EXTENSIONS_DIR", "HF_MODULES_CACHE", "NUMBA_CACHE_DIR"}
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")


def below_ours(root: Path) -> dict[str, str]:
    """Return the folders of libraries whose own are below the temporary directory."""
    return {name: str(root / "lmi_vllm" / folder) for name, folder in BELOW_OURS.items()}


def test_libraries_get_folders_of_this_user(tmp_path: Path, scratch: Path) -> None:
    """Mode 700, below vLLM's own cache, and the same at the next start."""
    environ = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    found = compiled_code_exports(environ)
    root = tmp_path / "home/vllm"
    assert found == {"VLLM_CACHE_ROOT": str(root)} | below_ours(root)
    for folder in found.values():
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    assert compiled_code_exports(environ) == found
    assert not list(scratch.iterdir())


def test_values_of_the_user_stay(
    tmp_path: Path, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of his that others can change is used, with a warning that names the variable."""
    inductor, triton = of_other_user(tmp_path / "shared"), tmp_path / "own"
    environ = dict.fromkeys(BELOW_OURS, str(triton)) | {
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(inductor),
        "DG_JIT_CACHE_DIR": str(inductor),
    }
    assert compiled_code_exports(environ) == {}
    for variable, warning in zip(
        ("DG_JIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), caplog.messages, strict=True
    ):
        assert f"{variable}={inductor}" in warning
        assert f"user {OTHER_USER}" in warning
    assert not list(scratch.iterdir())


def test_a_cache_that_others_can_change_is_left(
    tmp_path: Path, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A home of another user: all caches move below the temporary directory, by a stable name."""
    of_other_user(tmp_path / "home")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    root = scratch / f"lmi-vllm-cache-{os.geteuid()}"
    found = compiled_code_exports(environ)
    moved = {name: str(root / "lmi_vllm" / name.lower()) for name in BELOW_CACHES}
    assert found == {"VLLM_CACHE_ROOT": str(root)} | below_ours(root) | moved
    assert "VLLM_CACHE_ROOT chooses another" in caplog.text
    assert "TORCH_EXTENSIONS_DIR, HF_MODULES_CACHE choose other folders" in caplog.text
    assert compiled_code_exports(environ) == found
    assert compiled_code_folder(environ) == root  # where the compile cache keeps its entries


def test_caches_of_code_below_a_home_that_others_change_move(tmp_path: Path, scratch: Path) -> None:
    """FlashInfer, CUDA and others know no XDG_CACHE_HOME; a hub folder of its own counts, too."""
    home, hub = tmp_path / "user", of_other_user(tmp_path / "hub")
    environ = {"HOME": str(home), "XDG_CACHE_HOME": str(tmp_path / "xdg"), "HF_HOME": str(hub)}
    own = tmp_path / "xdg/vllm/lmi_vllm"
    home.mkdir()
    moved = compiled_code_exports(environ)
    assert moved["HF_MODULES_CACHE"] == str(own / "hf_modules_cache")
    assert "CUDA_CACHE_PATH" not in moved  # what is not there yet can only be made by us
    assert not list(home.iterdir())
    (home / ".nv").mkdir()
    (home / ".nv").chmod(0o777)
    assert compiled_code_exports(environ)["CUDA_CACHE_PATH"] == str(own / "cuda_cache_path")
    home.chmod(0o1777)
    moved = compiled_code_exports(environ)
    for variable in BELOW_HOME:
        assert moved[variable] == str(own / variable.lower())
    assert "TORCH_EXTENSIONS_DIR" not in moved
    named = {**environ, "HF_MODULES_CACHE": str(hub), "CUDA_CACHE_PATH": str(hub)}
    assert not {"HF_MODULES_CACHE", "CUDA_CACHE_PATH"} & compiled_code_exports(named).keys()


def test_a_user_without_a_home_gets_private_folders(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a user id of no entry, and no HOME."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(Path, "expanduser", lambda _: no_home())
    root = scratch / f"lmi-vllm-cache-{os.geteuid()}"
    found = compiled_code_exports({})
    assert found.keys() == {"VLLM_CACHE_ROOT", *BELOW_OURS, *BELOW_HOME, *BELOW_CACHES}
    assert all(Path(folder).is_relative_to(root) for folder in found.values())


def test_without_a_safe_folder_the_start_ends(tmp_path: Path, scratch: Path) -> None:
    """The text names both folders and the variable."""
    of_other_user(tmp_path / "home")
    taken = of_other_user(scratch / f"lmi-vllm-cache-{os.geteuid()}")
    with pytest.raises(StartupError, match="set VLLM_CACHE_ROOT") as refused:
        compiled_code_exports({"XDG_CACHE_HOME": str(tmp_path / "home")})
    assert str(taken) in refused.value.text


def test_the_compile_cache_has_its_own_folders(tmp_path: Path) -> None:
    """What it keeps comes first; the libraries that it does not know keep theirs."""
    environ = {"XDG_CACHE_HOME": str(tmp_path / "home"), "LMI_CACHE_URI": str(tmp_path / "store")}
    plain, cached = (
        kept_code(
            PlannedStart(
                engine,
                load_settings(environ),
                environ,
                ModelArtifacts("m", "org/model", "org/model"),
                EngineArguments({}),
                SOURCES,
            )
        )
        for engine in ("scripted", "vllm")
    )
    assert plain.cache is None
    assert plain.exports == {"VLLM_CACHE_ROOT": str(tmp_path / "home/vllm")} | below_ours(
        tmp_path / "home/vllm"
    )
    assert cached.cache is not None
    own = cached.cache.exports
    assert own.items() <= cached.exports.items()
    others = plain.exports.keys() - own.keys()
    assert others == {"CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"}
    assert all(cached.exports[name] == plain.exports[name] for name in others)
