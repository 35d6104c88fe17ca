"""What custom code can import: LMI's `djl_python`, and for an adapter the files of its own folder.

`djl_python` is our package under that name; it is registered when code is loaded, not before.

Two adapters may both have a `model.py` and a `prompts.py`, but Python keeps one module per name. So
an adapter's files become submodules of a package with a name of its own, which no other code can
see. Their import statements look there first: each such file gets builtins whose `__import__` does
so. Neither the Python path nor the modules of other code change.
"""

import builtins
import importlib
import importlib.abc
import importlib.machinery
import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any, Final

logger = logging.getLogger(__name__)

DJL_PYTHON: Final = "djl_python"
_OURS: Final = "lmi_vllm.features.custom_code.djl_python"
# LMI's modules, and ours that replace them.
MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{name: name for name in ("inputs", "outputs", "pair_list", "request", "request_io")},
        **dict.fromkeys(("input_parser", "output_formatter"), "formatting"),
        **dict.fromkeys(("async_utils", "encode_decode"), "shortcuts"),
        "np_util": "ndlist",
        "session_manager": "session_files",
        "streaming_utils": "streaming",
    }
)
_numbers = itertools.count(1)


def provide_djl_python() -> None:
    """Register our package as `djl_python`; warns where a real one is installed, which it hides."""
    ours = importlib.import_module(_OURS)
    if sys.modules.get(DJL_PYTHON) is ours:
        return
    real = importlib.machinery.PathFinder.find_spec(DJL_PYTHON)
    if real is not None:
        logger.warning(
            "%s is installed at %s; hooks get this server's own %s instead (%s)",
            DJL_PYTHON,
            real.origin or real.submodule_search_locations,
            DJL_PYTHON,
            ", ".join(sorted(MODULES)),
        )
    sys.modules[DJL_PYTHON] = ours
    for name, place in MODULES.items():
        module = importlib.import_module(f"{_OURS}.{place}")
        sys.modules[f"{DJL_PYTHON}.{name}"] = vars(ours)[name] = module


def provided_names(module: str) -> set[str]:
    """Return the names that a module of our `djl_python` has; "" is the package itself."""
    if not module:
        return {*vars(importlib.import_module(_OURS)), *MODULES}
    return {*vars(importlib.import_module(f"{_OURS}.{MODULES[module]}"))}


class SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles the source file; a stale or forged bytecode cache beside it is never read."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code compiled from the source file."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class PrivateModules(importlib.abc.MetaPathFinder):
    """The modules of one folder, under a package name that is used once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._package = f"lmi_vllm_adapter_code_{next(_numbers)}"
        self._builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}

    def load(self, name: str) -> ModuleType:
        """Return the executed module of that name in the folder."""
        package = ModuleType(self._package)
        package.__path__ = [str(self._folder)]
        sys.modules[self._package] = package
        sys.meta_path.insert(0, self)
        return importlib.import_module(f"{self._package}.{name}")

    def forget(self) -> None:
        """Unregister the modules; functions that are still referenced go on working."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in [*sys.modules]:
            if name == self._package or name.startswith(f"{self._package}."):
                del sys.modules[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the submodules of this package, and nothing else."""
        _ = target
        if not fullname.startswith(f"{self._package}."):
            return None
        for entry in path or ():
            # FileFinder only calls the loader, so a bound method works; its type says class.
            loaders: Any = (self._loader, importlib.machinery.SOURCE_SUFFIXES)
            spec = importlib.machinery.FileFinder(entry, loaders).find_spec(fullname)
            if spec is not None:
                return spec
        return None

    def _loader(self, fullname: str, path: str) -> "_PrivateLoader":
        return _PrivateLoader(fullname, path, self._builtins)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not self._has(top):
            return builtins.__import__(name, globals, locals, fromlist, level)
        private = f"{self._package}.{name}"
        if fromlist:
            return builtins.__import__(private, globals, locals, fromlist, 0)
        importlib.import_module(private)
        return sys.modules[f"{self._package}.{top}"]

    def _has(self, top: str) -> bool:
        folder = self._folder
        return (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()


class _PrivateLoader(SourceLoader):
    def __init__(self, fullname: str, path: str, own_builtins: dict[str, Any]) -> None:
        super().__init__(fullname, path)
        self._builtins = own_builtins

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with import statements that look in the folder first."""
        vars(module)["__builtins__"] = self._builtins
        super().exec_module(module)
