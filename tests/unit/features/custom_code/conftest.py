"""User code changes the process it is loaded into: these fixtures change it back."""

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    """Give back the working directory, the Python path and the modules."""
    sys.modules.pop("model", None)  # another test's server may have loaded one
    folder, modules = os.getcwd(), {*sys.modules}  # noqa: PTH109
    path, meta_path = [*sys.path], [*sys.meta_path]
    writes_bytecode = sys.dont_write_bytecode
    yield
    os.chdir(folder)
    sys.path[:], sys.meta_path[:], sys.dont_write_bytecode = path, meta_path, writes_bytecode
    for name in {*sys.modules} - modules:
        if not name.startswith("lmi_vllm."):
            del sys.modules[name]
