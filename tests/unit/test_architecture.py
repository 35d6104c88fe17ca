"""The packages and their allowed imports (ARCHITECTURE.md); fails on any other import."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmi_vllm

PACKAGE = Path(lmi_vllm.__file__).parent
_MODULES = (
    "errors|masked_urls|messages|hooks|multipart|_version|clock|slot|signals|private_folders"
    "|host_memory|installed"
)
SHARED = rf"({_MODULES})\.\w+"
DEMO = r"demo\.DEMO_MODEL_DIR"
ENGINE = r"engine\.base\..*"
# Room -> what of ours it may import besides itself (pattern over the dotted name below lmi_vllm).
# No package of the core is allowed `features`; a feature may import the core and itself.
PACKAGES = {
    "masked_urls": r"",
    "errors": r"masked_urls\..*",
    "messages": r"errors\..*",
    "hooks": r"(errors|messages)\..*",
    "multipart": r"errors\..*",
    "_version": r"",
    "clock": r"",
    "slot": r"",
    "private_folders": r"",
    "host_memory": r"",
    "installed": r"",
    "signals": r"",  # imported before everything else
    "demo": r"",
    "telemetry": SHARED,
    "sources": SHARED,
    "config": rf"{SHARED}|{DEMO}|sources\..*",
    "checks": rf"{SHARED}|{DEMO}|(config|sources)\..*",
    "translate": rf"{SHARED}|{DEMO}|(config|sources|checks)\..*",
    # Pure checks of files are made once more, on the copy that the engine reads.
    "engine": rf"{SHARED}|telemetry\..*"
    r"|checks\.(adapter_config|adapter_names|adapter_weights|base_model|safetensors_header)\.\w+",
    "adapters": rf"{SHARED}|{ENGINE}|(checks|sources)\..*",
    "inference": rf"{SHARED}|{ENGINE}|(telemetry|adapters)\..*",
    "web": rf"{SHARED}|(telemetry|adapters|inference)\..*",
    "server": rf"{SHARED}|{DEMO}|(config|translate|checks|sources|engine|telemetry)\..*"
    r"|(adapters|inference|web|translate)\..*",
    "commands": rf"{SHARED}|(config|translate|checks|sources|telemetry|server)\..*"
    r"|engine\.(factory|vllm\.processes)\..*",
    "cli": rf"{SHARED}|assembly\.\w+|translate\.configuration\.Configuration"
    r"|server\.parts\.Assembled|features\.\w+\.command",  # verbs are imported by name
    "assembly": rf"{SHARED}|(config|translate|features|server|web)\..*"
    r"|engine\.vllm\.parts\.ProcessParts|inference\.service\.InferenceService",
    "ray": r"features\.ray_serve\.(adapters|deployment)\.\w+",  # what Ray imports by name
    "__main__": r"cli\.main|signals\.\w+",
    "__init__": r".*",  # the public names, imported when used
}
AWS = r"features/object_stores/\w+\.py|features/bench/sagemaker_client\.py"
# Foreign library -> the files that may know it (pattern over the path below lmi_vllm).
LIBRARIES = {
    "vllm": r"engine/vllm/((workarounds|cpu)/)?\w+\.py"
    r"|features/(grammar_trials/guard|legacy_models/classes|seq2seq/requests)\.py",
    "aiohttp": r"(web|server|commands)/\w+\.py|(cli|assembly)\.py"
    r"|features/(bench/http_client|(api_docs|console|front_ends|kserve|load_reports|media_urls|ray_serve|root_path"
    r"|management|tgi|vllm_adapters)/\w+)\.py",
    "pydantic": r"config/(settings|options/row)\.py|inference/request/parameters\.py"
    r"|engine/vllm/(configuration|openai|routes)\.py"
    r"|features/(retired_options/options|seq2seq/requests|vllm_adapters/routes)\.py",
    "boto3": AWS,
    "botocore": AWS,
    "obstore": r"features/object_stores/cloud_\w+\.py",
    "huggingface_hub": r"features/hub/\w+\.py",
    "ray": r"features/ray_serve/deployment\.py",
    "xgrammar": r"features/grammar_trials/walks\.py",
    "prometheus_client": r"telemetry/metric(s|_files)\.py|web/management_routes\.py"
    r"|features/(metrics|exporters/lmi_series|front_ends/series|lora_series/series)\.py",
    "opentelemetry": r"features/traces/spans\.py",
    "torch": r"engine/vllm/((workarounds|cpu)/)?\w+\.py|features/(seq2seq|legacy_models)/\w+\.py"
    r"|features/(grammar_trials/guard|media_urls/tensors|pickled_adapters/convert)\.py",
    "transformers": r"engine/vllm/\w+\.py|features/seq2seq/(decoding|model|sampling)\.py"
    r"|features/legacy_models/classes\.py",
    "tokenizers": r"features/(token_lane/decoding|seq2seq/text)\.py"
    r"|engine/vllm/workarounds/(prompt_ends|published_tokenizers|tokenizer_files|tool_calls)\.py",
}
# Besides cli.py: what vLLM is told through the environment, and what its child processes read.
ENVIRONMENT = (
    r"(cli|features/image/(__main__|commands)|features/ray_serve/deployment)\.py|commands/serve\.py"
    r"|engine/vllm/(configuration|start|start_steps|processes|cpu/compilation)\.py"
    r"|engine/vllm/workarounds/(engine_context|model_scripts)\.py"
)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield every imported module, with the name taken from it: `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.match(r"lmi_vllm\.features\.", str(node.value)):
            yield str(node.value).replace(":", ".")  # imported by its name as text


def test_python_starts_without_the_working_directory() -> None:
    """An `orjson.py` there ran as the server: every process gets -P or -I."""
    starts = [
        (path.name, found[1])
        for path in PACKAGE.rglob("*.py")
        for found in re.finditer(r'(?:sys\.executable|\[python),\s*"(-\w+)"', path.read_text())
    ]
    assert len(starts) >= 6
    assert not [start for start in starts if start[1] not in ("-P", "-I", "-ISc")]


def touches_environment(tree: ast.AST) -> bool:
    """Whether the file names os.environ or os.getenv."""
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool({"os.environ", "os.getenv"} & {*names, *imported_names(tree)})


# Features that are programs of their own: they call the composition root, as `cli` does.
PROGRAMS = r"features/(front_ends/process|image/__main__|ray_serve/child)\.py"


def allowed_names(path: str) -> str:
    """Return the pattern of what the file at `path` may import of ours."""
    package, *rest = path.split("/")
    if package == "features":
        roots = "features" if re.fullmatch(PROGRAMS, path) else "features|cli|assembly"
        return rf"(?!({roots})\b).*|features\.({rest[0]}|transfer|metrics)\..*"
    package = package.removesuffix(".py")
    return rf"{PACKAGES[package]}|{package}\..*"


def violations(path: str, source: str) -> list[str]:
    """Return what the file at `path` (below the package) may not import or touch."""
    tree, allowed = ast.parse(source), allowed_names(path)
    found = []
    for name in imported_names(tree):
        top, _, rest = name.partition(".")
        if top == "":
            found.append(f"relative import {name}")
        elif top == "lmi_vllm":
            if not re.fullmatch(allowed, rest):
                found.append(name)
        elif not re.fullmatch(LIBRARIES.get(top, ".*"), path):
            found.append(name)
    if touches_environment(tree) and not re.fullmatch(ENVIRONMENT, path):
        found.append("os.environ")
    return found


FILES = sorted(str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_architecture_file_imports_only_downwards(path: str) -> None:
    """Every file keeps to its package's row of the table."""
    assert violations(path, (PACKAGE / path).read_text()) == []


BREACHES = {
    "inference/a.py": "from lmi_vllm.web.app import create_app",
    "inference/b.py": "from lmi_vllm.engine.vllm.engine import VllmEngine",
    "inference/c.py": "from lmi_vllm.engine import factory",
    "config/a.py": "from lmi_vllm.engine.base import Engine",
    "config/b.py": "import pydantic",
    "config/c.py": "from huggingface_hub import HfApi",
    "config/d.py": "def f():\n    import boto3",
    "engine/base.py": "from vllm import AsyncLLM",
    "engine/a.py": "from lmi_vllm.config.settings import Settings",
    "web/a.py": "from lmi_vllm.config.settings import Settings",
    "web/b.py": "from . import keys",
    "web/c.py": "import os\nx = os.environ['A']",
    "inference/d.py": "import os\nx = os.getenv('A')",
    "inference/e.py": "import aiohttp.web",
    "errors.py": "from lmi_vllm.messages import Reply",
    "inference/f.py": "from os import environ",
    "config/e.py": "from lmi_vllm.translate.rules import task",
    "sources/a.py": "from lmi_vllm.checks.model import check_model",
    "adapters/a.py": "from lmi_vllm.inference.service import InferenceService",
    "inference/g.py": "from lmi_vllm.features.seq2seq.rules import runs_here",
    "server/a.py": "def f():\n    import lmi_vllm.features.front_ends.group",
    "server/b.py": "from lmi_vllm.features import front_ends",
    "server/d.py": "import importlib\nimportlib.import_module('lmi_vllm.features.seq2seq.engine')",
    "server/c.py": "from lmi_vllm.commands.serve import end_process",
    "features/console/a.py": "from lmi_vllm.features.bench.run import LoadRun",
    "features/console/b.py": "from lmi_vllm.assembly import configuration",
    "cli.py": "from lmi_vllm.web.app import create_app",
}


@pytest.mark.parametrize(("path", "source"), BREACHES.items(), ids=BREACHES)
def test_architecture_breach_is_found(path: str, source: str) -> None:
    """The table does fail: each of these imports is a breach."""
    assert len(violations(path, source)) == 1


def test_architecture_classes_have_distinct_names() -> None:
    """One name is one thing: no two classes of the package share it."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


# The objects of a server, by the names that code has for them.
OBJECTS = {
    "service", "registry", "adapters", "telemetry", "hub", "queue", "lifecycle", "events", "engine",
    "shared", "settings", "profile", "processes",
}  # fmt: skip
# What a feature's lifespan may set, and at a moment that no constructor knows.
SETTABLE = {
    ("features/front_ends/group.py", "service.telemetry.series"),
    ("features/lora_series/series.py", "service.telemetry.series"),
    ("features/traces/start.py", "self._hub.start_span"),
}


def written_from_outside(source: str) -> Iterator[str]:
    """Yield the fields that are set on an object of a server, but not by itself."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else (target,):
                if isinstance(one, ast.Attribute):
                    owner = ast.unparse(one.value).rpartition(".")[2].lstrip("_")
                    if owner in OBJECTS:
                        yield ast.unparse(one)


def test_architecture_objects_are_complete_once_made() -> None:
    """Their constructors take what they need; nothing fills one in later."""
    found = {
        (str(path.relative_to(PACKAGE)), target)
        for path in PACKAGE.rglob("*.py")
        for target in written_from_outside(path.read_text(encoding="utf-8"))
    }
    assert found - SETTABLE == set()
    assert list(written_from_outside("registry.find = self.look")) == ["registry.find"]


def arrows(path: str) -> set[str]:
    """Return the modules of ours that the file imports, for the type checker too."""
    known = {name.removesuffix(".py").replace("/", "."): name for name in FILES}
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for name in imported_names(ast.Module([node], [])):
            below = name.removeprefix("lmi_vllm.")
            module, _, _ = below.rpartition(".")
            for one in (below, module, f"{module}.__init__"):
                if one in known and name != below:
                    found.add(known[one])
                    break
    return found - {path}


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules of which each reaches every other."""
    reached: dict[str, set[str]] = {}
    for start in imports:
        seen, waiting = set[str](), [start]
        while waiting:
            more = imports[waiting.pop()] - seen
            seen |= more
            waiting += more
        reached[start] = seen
    groups = {
        frozenset(other for other in reached[one] if one in reached[other])
        for one in imports
        if one in reached[one]
    }
    return sorted(map(set, groups), key=len)


def test_architecture_no_modules_import_each_other() -> None:
    """Types count, too: a circle of types is one in the head of a reader."""
    assert circles({path: arrows(path) for path in FILES}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]
