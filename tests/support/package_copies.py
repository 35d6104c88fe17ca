"""A package without some of its extras: a folder of links, to be put on a path of its own."""

from collections.abc import Collection
from pathlib import Path

import lmi_vllm

PACKAGE = Path(lmi_vllm.__file__).parent
ENGINE = "scripted"  # the extra with the engine that tests use
EXTRAS = sorted(
    path.parent.name for path in PACKAGE.glob("extras/*/__init__.py") if path.parent.name != ENGINE
)


def package_without(names: Collection[str], folder: Path) -> Path:
    """Return `folder`, in which `lmi_vllm` has every extra but those of `names`."""
    extras = folder / "lmi_vllm" / "extras"
    extras.mkdir(parents=True)
    for path in PACKAGE.iterdir():
        if path.name not in ("extras", "__pycache__"):
            (folder / "lmi_vllm" / path.name).symlink_to(path)
    for path in (PACKAGE / "extras").iterdir():
        if path.name not in ("__pycache__", *names):
            (extras / path.name).symlink_to(path)
    return folder
