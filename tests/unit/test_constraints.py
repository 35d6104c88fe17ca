"""config/constraints/ pins every package that an extra brings, within the ranges asked for."""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "config" / "constraints"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOW = "run `make constraints` and commit config/constraints/"
# What an extra's own file leaves to another one.
FILES = {
    "base": ["base"],
    "otel": ["otel"],
    "cpu": ["cpu"],
    "cuda": ["cuda"],
    "dev": ["cpu", "dev"],
}
NOT_IN_IMAGES = {"torchaudio", "torchcodec"}


def pins(name: str) -> dict[str, str]:
    """Return the pinned version of each package in a file."""
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    found = (re.match(r"([\w.-]+)==([^\s;\\]+)", line) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def direct_requirements(extra: str) -> list[Requirement]:
    """Return what pyproject.toml asks for: the base, and the extra's own."""
    own = [] if extra == "base" else PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in [*PROJECT["dependencies"], *own]]


@pytest.mark.parametrize("extra", FILES)
def test_requirements_of_pyproject_are_pinned_within_their_range(extra: str) -> None:
    """A dependency added or moved without new constraints is red here."""
    known = {name: version for file in FILES[extra] for name, version in pins(file).items()}
    for requirement in direct_requirements(extra):
        name = canonicalize_name(requirement.name)
        assert name in known, f"{name} is not pinned: {HOW}"
        assert requirement.specifier.contains(known[name], prereleases=True), f"{name}: {HOW}"


def installed_closure(roots: list[Requirement]) -> set[str]:
    """Return every distribution that `roots` bring here, markers and extras followed."""
    seen: set[tuple[str, str]] = set()
    waiting = [(root, extra) for root in roots for extra in ("", *root.extras)]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen or not applies(requirement, ""):
            continue
        try:
            inner = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # this extra, or a companion set-up removed, is not installed
        seen.add((name, extra))
        for child in map(Requirement, inner):
            if applies(child, extra):
                child.marker = None
                waiting += [(child, wanted) for wanted in ("", *child.extras)]
    return {name for name, _ in seen}


def applies(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement counts on this machine."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def test_compiler_of_the_cuda_image_is_of_its_headers_release() -> None:
    """CUDA's headers refuse an nvcc of another release: FlashInfer's kernels do not compile."""
    known = pins("cuda")
    release = known["nvidia-cuda-runtime"].rpartition(".")[0]
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"):
        assert known[name].startswith(f"{release}."), f"{name} {known[name]}, headers {release}"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="constraints are for Python 3.11")
@pytest.mark.parametrize("extra", ["base", "otel", "cpu", "dev"])
def test_everything_that_is_installed_for_an_extra_is_pinned(extra: str) -> None:
    """Every transitive one: the walk goes over what pip really installed here."""
    known = {name for file in FILES[extra] for name in pins(file)}
    missing = installed_closure(direct_requirements(extra)) - known
    assert not missing, f"not pinned: {sorted(missing)}: {HOW}"


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_the_images_check_a_hash_of_every_package(extra: str) -> None:
    """The file of hashes has the same pins, each with a SHA-256; companions stay out of CPU."""
    expected = pins(extra)
    if extra == "cpu":
        expected = {name: pin for name, pin in expected.items() if name not in NOT_IN_IMAGES}
    assert pins(f"{extra}-hashes") == expected
    blocks = re.split(r"\n(?=\w)", (FOLDER / f"{extra}-hashes.txt").read_text())[1:]
    assert len(blocks) == len(expected)
    assert all("--hash=sha256:" in block for block in blocks)


def test_development_versions_fit_both_builds() -> None:
    """No package has one version in dev.txt and another for the engine: pip could not do both."""
    for extra in ("cpu", "cuda"):
        engine, tools = pins(extra), pins("dev")
        clashes = {name for name in engine.keys() & tools.keys() if engine[name] != tools[name]}
        assert not clashes


def test_the_images_carry_obstore() -> None:
    """Models in gs:// and az:// start there, without a package to add."""
    assert all("obstore" in pins(name) for name in ("cpu-hashes", "cuda-hashes"))


def test_the_cuda_image_carries_lmcache() -> None:
    """Configurations of LMI that name it start there; it has no build without CUDA."""
    assert [name for name in ("cpu", "cuda", "cuda-hashes") if "lmcache" in pins(name)] == [
        "cuda", "cuda-hashes",
    ]  # fmt: skip
