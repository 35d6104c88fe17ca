"""What Transformers looks up while it is imported: the same answers, from fewer files."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lmi_vllm.engine.vllm.workarounds.slow_imports import ShortDistribution, packages_distributions

pytestmark = pytest.mark.vllm
transformers = pytest.importorskip("transformers", reason="needs vLLM: make setup installs it")

PROGRAM = """
import contextlib, sys
from lmi_vllm.engine.vllm.workarounds.slow_imports import quick_imports
with quick_imports() if sys.argv[1] == "ours" else contextlib.nullcontext():
    import transformers.models
from transformers.utils.import_utils import create_import_structure_from_path as read
names = vars(transformers.models)
found = {**names["_class_to_module"], **names["_object_missing_backend"]}
structure = sorted(map(repr, found.items()))
print(read.cache_info().misses, *structure, sep="\\n")
"""


def imported(how: str) -> tuple[int, list[str]]:
    """Return how many folders a new process has read, and where it found which class."""
    command = [sys.executable, "-c", PROGRAM, how]
    environ = {"PYTHONHASHSEED": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    count, *structure = done.stdout.splitlines()
    return int(count), structure


def test_plain_transformers_reads_its_sources_twice() -> None:
    """It keeps 128 folders of 500; ours keeps all, and finds the same classes in them."""
    models = Path(transformers.__file__).parent / "models"
    folders = sum(path.is_dir() and path.name != "__pycache__" for path in models.rglob("*"))
    plain, ours = imported("plain"), imported("ours")
    assert plain[0] > 1.5 * folders
    assert ours[0] <= folders + 2  # the folder of all, which is asked for by two names
    assert ours[1] == plain[1]
    assert len(ours[1]) > folders


def test_packages_are_listed_as_by_python() -> None:
    """Of all that are installed here, with few of their files."""
    installed = list(metadata.distributions())
    assert packages_distributions() == metadata.packages_distributions()
    files = sum(len(one.files or ()) for one in installed)
    assert sum(len(ShortDistribution(one).files or ()) for one in installed) < files / 4


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ("a/b.py,,\na/c.py,,\na/d.so,,\nsingle.py,,\n", ["a", "single"]),
        ('"a,b/c.py",,\n', ["a,b"]),
        ("../../bin/tool,,\nnative.abi3.so,,\n", None),
        ("", None),
    ],
)
def test_odd_distributions_are_listed_as_by_python(
    record: str, names: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of their own at the top, names with commas, nothing to import, no list of files."""
    folder = tmp_path / "odd-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nNAME:  Odd.Name\n\nName: of the text\n"
    )
    (folder / "RECORD").write_text(record)
    for line in record.splitlines():
        path = tmp_path / line.rstrip(",").strip('"')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = packages_distributions()
    assert found == metadata.packages_distributions()
    assert names is None or found == {name: ["Odd.Name"] for name in names}


def test_front_end_is_not_imported_before_the_engine_is_forked() -> None:
    """130 modules that the engine needs nothing of; they are imported while it starts."""
    program = "import sys, lmi_vllm.engine.vllm.start; print(*sys.modules)"
    environ = {"PYTHONPATH": str(Path(__file__).parents[2]), "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "vllm.v1.engine.core_client" in imported
    assert not imported & {"lmi_vllm.engine.vllm.engine", "vllm.entrypoints.launchers.app"}
