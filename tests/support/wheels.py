"""Wheels of one tiny module, for tests that install something."""

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str = "tinyreq", needs: str = "") -> None:
    """Write a wheel of one module, as a packer would."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "ANSWER = 42\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        wheel.writestr(
            f"{info}/METADATA", metadata + (f"Requires-Dist: {needs}\n" if needs else "")
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
