"""From lines of serving.properties to vLLM's own configuration, without starting an engine."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_vllm.config.model_source import locate_model
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.vllm.configuration import engine_args_from
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.messages import EngineArguments
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate
from tests.support.vllm_namespace import namespace_of

_PLAIN = "option.dtype=fp32\noption.enforce_eager=true\n"


def engine_arguments(
    lines: str, folder: Path, config: Mapping[str, object] | None = None, *, gpus: int = 0
) -> EngineArguments:
    """The engine arguments of the embedded model in `folder` with these lines.

    `config` changes the model's config.json. Later lines win.

    Raises:
        ConfigurationError: the translation refuses them.
    """
    leave_out = shutil.ignore_patterns("serving.properties", "adapters")
    shutil.copytree(DEMO_MODEL_DIR, folder, ignore=leave_out, dirs_exist_ok=True)
    path = folder / "config.json"
    stated = json.loads(path.read_text("utf-8")) | dict(config or {})
    path.write_text(json.dumps(stated), encoding="utf-8")
    return translated(lines, folder, gpus=gpus)


def translated(lines: str, folder: Path, *, gpus: int = 0) -> EngineArguments:
    """The engine arguments of the model in `folder` with these lines.

    Raises:
        ConfigurationError: the translation refuses them.
    """
    (folder / "serving.properties").write_text(_PLAIN + lines, encoding="utf-8")
    environ = {"HF_MODEL_ID": str(folder)}
    settings = load_settings(environ)
    assert not settings.errors
    found = translate(settings, locate_model(settings, environ), Devices(gpus))
    if found.errors:
        raise ConfigurationError(found.errors)
    return found.arguments


def vllm_configuration(arguments: EngineArguments) -> Any:
    """The configuration vLLM makes of them."""
    return engine_args_from(namespace_of(arguments.values)).create_engine_config()
