"""Code of adapters: isolated from each other's, from the base model's and from the server's."""

import sys
from pathlib import Path

import pytest

from lmi_vllm.features.custom_code.functions import FileFunctions, HookContext
from lmi_vllm.features.custom_code.loading import CodeError, load_adapter_code, load_model_code
from tests.support.hook_files import write_code

ADAPTER = """
    from djl_python.output_formatter import output_formatter
    import helper
    from package.inner import WHO as inner

    @output_formatter
    def answer(response):
        import late
        return [helper.WHO, inner, late.WHO]
"""


def write_adapter(folder: Path, who: str) -> Path:
    """Write an adapter's code: its file, a helper, a package, and a helper imported late."""
    write_code(folder, ADAPTER)
    write_code(folder, f"import late\nWHO = '{who}'\n", "helper.py")
    write_code(folder, f"WHO = '{who}'\n", "late.py")
    write_code(folder / "package", "", "__init__.py")
    write_code(folder / "package", f"import helper\nWHO = helper.WHO + '-{who}'\n", "inner.py")
    return folder


def answer_of(hooks: FileFunctions) -> object:
    """Return what the output hook says."""
    assert hooks.output is not None
    return hooks.output.call(None, HookContext({}))


def test_adapters_see_their_own_files_only(tmp_path: Path) -> None:
    """Same names everywhere, also for what a function imports when it is called."""
    base = write_code(tmp_path / "base", ADAPTER)
    write_adapter(base.parent, "base")
    base_hooks = load_model_code(base, "handle", None)
    a = load_adapter_code(write_adapter(tmp_path / "a", "a"))
    b = load_adapter_code(write_adapter(tmp_path / "b", "b"))
    assert answer_of(a) == ["a", "a-a", "a"]
    assert answer_of(b) == ["b", "b-b", "b"]
    assert answer_of(base_hooks) == ["base", "base-base", "base"]
    assert answer_of(a) == ["a", "a-a", "a"]


def test_adapter_code_is_dropped_and_read_again(tmp_path: Path) -> None:
    """A name that is registered again gets the code that is there now; nothing old is left."""
    path, meta = [*sys.path], [*sys.meta_path]
    old = load_adapter_code(write_adapter(tmp_path, "old"))
    old.forget()
    new = load_adapter_code(write_adapter(tmp_path, "new"))
    assert answer_of(new) == ["new", "new-new", "new"]
    new.forget()
    assert [name for name in sys.modules if name.startswith("lmi_vllm_adapter_code")] == []
    assert (sys.path, sys.meta_path) == (path, meta)
    assert list(tmp_path.rglob("__pycache__")) == []


def test_adapter_code_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A broken file is refused with its place, and its modules are gone."""
    write_code(tmp_path, "WHO = 1\n", "helper.py")
    with pytest.raises(CodeError, match=r"model.py, line 2: ZeroDivisionError"):
        load_adapter_code(write_code(tmp_path, "import helper\n1 / 0\n").parent)
    assert [name for name in sys.modules if name.startswith("lmi_vllm_adapter_code")] == []
