"""Companions of torch that do not fit are taken for absent; the ones that fit stay."""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lmi_vllm.engine.vllm.cpu.companions import suspects


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, ("torchvision",)),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, ()),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, ()),
        ({"torchvision": "0.28.0"}, ()),
        ({"torch": "2.13.0+cpu"}, ()),
    ],
)
def test_companions_are_checked_only_with_a_cpu_torch(
    versions: dict[str, str], expected: tuple[str, ...]
) -> None:
    """A fitting build, or a CUDA torch, is left alone."""
    assert suspects(versions) == expected


def package(folder: Path, name: str, version: str, body: str) -> None:
    """Write a package that pip would call installed."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(body)
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def answer_of(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that finds the packages of `folder` and ours, and none that is installed."""
    ours = Path(importlib.util.find_spec("lmi_vllm").origin).parent.parent  # type: ignore[union-attr, arg-type]
    return subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(program)],
        env={"PYTHONPATH": f"{folder}:{ours}"},
        capture_output=True,
        text=True,
        check=True,
    )


def test_torchvision_is_used_without_its_compiled_operators(tmp_path: Path) -> None:
    """Its transforms are Python, and models that see pictures ask for them."""
    package(tmp_path, "torch", "9.9+cpu", "")
    body = "from torchvision import extension, _meta_registrations, transforms"
    package(tmp_path, "torchvision", "9.9", body)
    for name, text in (
        ("extension", "TIMES = 1"),
        ("_meta_registrations", "raise RuntimeError('operator nms does not exist')"),
        ("transforms", "resize = 'Python'"),
    ):
        (tmp_path / "torchvision" / f"{name}.py").write_text(text)
    answer = answer_of(
        tmp_path,
        """\
        import importlib.util
        from lmi_vllm.engine.vllm.cpu.companions import hide_unfit_companions
        assert hide_unfit_companions() == ()
        assert importlib.util.find_spec("torchvision") is not None
        import torchvision.transforms
        print(torchvision.transforms.resize)
        """,
    )
    assert answer.stdout == "Python\n"


def test_companion_that_fails_to_import_is_reported_absent(
    tmp_path: Path,
) -> None:
    """What transformers asks (`find_spec`) says no for the first, yes for the second."""
    package(tmp_path, "torch", "9.9+cpu", "")
    package(tmp_path, "torchvision", "9.9", "raise RuntimeError('operator nms does not exist')")
    package(tmp_path, "torchaudio", "9.9", "")
    answer = answer_of(
        tmp_path,
        """\
        import importlib.util
        from lmi_vllm.engine.vllm.cpu.companions import hide_unfit_companions
        assert hide_unfit_companions() == ("torchvision",)
        assert importlib.util.find_spec("torchvision") is None
        assert importlib.util.find_spec("torchaudio") is not None
        try:
            import torchvision.io
        except ImportError:
            print("absent")
        """,
    )
    assert answer.stdout == "absent\n"
    assert "pip uninstall torchvision" in answer.stderr
