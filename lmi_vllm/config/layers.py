"""The sources of settings, and the two orders that decide which one wins.

Each kind of origin is one function that yields texts by key. Model keys take the file over the
environment, server keys the environment over the file. `model_sources` and `server_sources` are
these orders, best first. `Layers` has the text that counts for each key, and resolve.py parses it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.options import (
    ALIAS_VARIABLES,
    HUB_VARIABLES,
    LATE_VARIABLES,
    SAGEMAKER_VARIABLES,
)
from lmi_vllm.config.options.row import CONFIG
from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.setting import (
    FILE_PREFIX,
    UNSET_TEXTS,
    CommandLine,
    OtherSettings,
    RawValue,
    Report,
    Source,
)
from lmi_vllm.config.variable_names import (
    ARGUMENT_PREFIX,
    OPTION_PREFIX,
    SAGEMAKER_PREFIX,
    SERVING_PREFIX,
    option_key,
)
from lmi_vllm.config.whole_variables import whole_variables
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.messages import Origin, OriginKind

IMAGE_ADDRESS: Final = "http://0.0.0.0:8080"  # SERVING_INFERENCE_ADDRESS of our images
_SAGEMAKER_FOLDER: Final = "/opt/ml/model"
_LMI_NAME: Final = "lmi"  # of a model whose names are not set
_ADDRESS: Final = "inference_address"
_MODEL_ID: Final = f"{FILE_PREFIX}model_id"
_SERVED_NAMES: Final = f"{FILE_PREFIX}served_model_name"


def model_sources(
    environ: Mapping[str, str],
    command_line: CommandLine,
    file: PropertiesFile | None,
    table: OptionTable,
    images: OtherSettings,
) -> tuple[Source, ...]:
    """The order for model keys, best first: the file wins over the environment."""
    named = _sources(
        flags=_model_flags(command_line),
        vllm=_of_model(command_line.vllm.values),
        sagemaker=_variables(environ, SAGEMAKER_VARIABLES, OriginKind.PLATFORM),
        file=of_file(file),
        # The embedded model has no revision on the hub.
        hub=_variables({} if command_line.demo else environ, HUB_VARIABLES, OriginKind.HUB),
        options=option_variables(environ, table),
        aliases=option_aliases(environ, images),
        images=_of_model(images.values),
        late=_late_variables(environ),
    )
    defaults = tuple(_vllm_defaults(named, command_line.vllm.defaults))
    defaults = defaults or tuple(_sagemaker_names(named, environ))
    return (*named, *_sources(defaults=defaults))


def server_sources(
    environ: Mapping[str, str],
    command_line: CommandLine,
    file: PropertiesFile | None,
    report: Report,
    table: OptionTable,
    images: OtherSettings,
) -> tuple[Source, ...]:
    """The order for server keys, best first: the environment wins over the file."""
    counts = {row.name for row in table.rows.server if CONFIG in row.written}
    defaults = tuple(_of_server(command_line.vllm.defaults))
    others = {raw.key for raw in (*_of_server(images.values), *defaults)}
    serving = _serving_variables(environ, table)
    if _ADDRESS in others:  # no user said so: each of our images does
        serving = (raw for raw in serving if (raw.key, raw.text) != (_ADDRESS, IMAGE_ADDRESS))
    named = _sources(
        demo=_demo_store(command_line),
        vllm=_of_server(command_line.vllm.values),
        sagemaker=_request_size(environ, report),
        serving=serving,
        aliases=_serving_aliases(environ),
        images=_of_server(images.values),
        flags=_upstream_flags(command_line),
        file=(raw for raw in of_file(file) if raw.key in counts),  # others are read elsewhere
        defaults=defaults,
    )
    return (*named, *whole_variables(environ, command_line, table, images))


def _vllm_defaults(named: Iterable[Source], defaults: tuple[RawValue, ...]) -> Iterator[RawValue]:
    """The defaults of `vllm serve` for model keys, which serves a model under the name it got."""
    yield from _of_model(defaults)
    model = next((raw for raw in _values(named) if raw.key == _MODEL_ID and raw.text), None)
    if defaults and model is not None:
        name = json.dumps([model.text])
        yield RawValue(_SERVED_NAMES, name, defaults[0].origin)


def _sagemaker_names(named: Iterable[Source], environ: Mapping[str, str]) -> Iterator[RawValue]:
    """The names of a model beside `SM_VLLM_*`: vLLM's own first, which clients of AWS's image send.

    Its script names the model by its id, or by SageMaker's folder.
    """
    given = {raw.key for raw in _values(named)}
    is_ours = not any(name.startswith(SAGEMAKER_PREFIX) for name in environ)
    if is_ours or _SERVED_NAMES in given:
        return
    model = next((raw.text for raw in _values(named) if raw.key == _MODEL_ID and raw.text), None)
    names = json.dumps([model or _SAGEMAKER_FOLDER, _LMI_NAME])
    origin = Origin(OriginKind.VARIABLE, f"{SAGEMAKER_PREFIX}* without SERVED_MODEL_NAME")
    yield RawValue(_SERVED_NAMES, names, origin)


def _values(sources: Iterable[Source]) -> Iterator[RawValue]:
    """Every text of the sources, best first."""
    for source in sources:
        yield from source


def _of_model(values: Iterable[RawValue]) -> Iterator[RawValue]:
    """Options and keys of serving.properties out of another server's settings."""
    return (raw for raw in values if not raw.key.isupper())


def _of_server(values: Iterable[RawValue]) -> Iterator[RawValue]:
    """Server settings, `SERVING_<NAME>`, out of another server's settings."""
    for raw in values:
        if raw.key.startswith(SERVING_PREFIX):
            yield replace(raw, key=raw.key.removeprefix(SERVING_PREFIX).lower())


def _sources(**values: Iterable[RawValue]) -> tuple[Source, ...]:
    return tuple(tuple(found) for found in values.values())


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "") not in UNSET_TEXTS


def _variable(
    environ: Mapping[str, str], name: str, kind: OriginKind, *keys: str
) -> Iterator[RawValue]:
    """Variable `name` under each of `keys`, unless it is unset or empty."""
    if environ.get(name):
        for key in keys:
            yield RawValue(key, environ[name], Origin(kind, name))


def _flag(key: str, text: str | None, name: str) -> Iterator[RawValue]:
    """What was typed with the flag `name`, under `key`."""
    if text:
        yield RawValue(key, text, Origin(OriginKind.FLAG, name))


def of_file(file: PropertiesFile | None) -> Iterator[RawValue]:
    """The keys of a properties file, each with file and line."""
    if file is not None:
        for key, entry in file.by_key().items():
            yield RawValue(key, entry.value, file.origin(entry))


def _model_flags(command_line: CommandLine) -> Iterator[RawValue]:
    """`--model` and `--demo`, as far as they choose the model."""
    key = f"{FILE_PREFIX}model_id"
    if command_line.model:
        return _flag(key, command_line.model, command_line.model_flag)
    return _flag(key, str(DEMO_MODEL_DIR) if command_line.demo else None, "--demo")


def _variables(
    environ: Mapping[str, str], table: Iterable[tuple[str, tuple[str, ...]]], kind: OriginKind
) -> Iterator[RawValue]:
    """The variables of a table, each under its keys."""
    for name, keys in table:
        yield from _variable(environ, name, kind, *keys)


def option_variables(environ: Mapping[str, str], table: OptionTable) -> Iterator[RawValue]:
    """Every `OPTION_*` and `ARGS_*` that is not empty and not Kubernetes'."""
    keys = {OPTION_PREFIX: option_key, ARGUMENT_PREFIX: table.argument_key}
    for name, text in environ.items():
        key = keys.get(name[: name.find("_") + 1])
        if key is not None and not table.is_kubernetes_made(name, text):
            yield from _variable(environ, name, OriginKind.VARIABLE, key(name))


def option_aliases(
    environ: Mapping[str, str],
    images: OtherSettings = OtherSettings(),  # noqa: B008 - frozen
) -> Iterator[RawValue]:
    """Each older name of an `OPTION_*` variable, which comes first where both are set."""
    is_newer_tgi = any(raw.origin.name == "CUDA_GRAPHS" for raw in images.values)
    for alias in ALIAS_VARIABLES:
        if not alias.target.startswith(OPTION_PREFIX):
            continue
        if alias.source == "ENABLE_CUDA_GRAPHS" and is_newer_tgi:
            continue  # only older releases read it
        key = option_key(alias.target)
        for raw in _variable(environ, alias.source, OriginKind.ALIAS, key):
            if alias.source == "ENABLE_CUDA_GRAPHS":
                yield replace(raw, text="false" if raw.text == "true" else "true")
            else:
                yield raw


def _late_variables(environ: Mapping[str, str]) -> Iterator[RawValue]:
    """Variables consulted only while their option is unset, or the alias that stands for one."""
    for name, option in LATE_VARIABLES:
        aliases = (alias.source for alias in ALIAS_VARIABLES if alias.target == name)
        for source in (name,) if _is_set(environ, name) else aliases:
            yield from _variable(environ, source, OriginKind.LATE, f"{FILE_PREFIX}{option}")


def _demo_store(command_line: CommandLine) -> Iterator[RawValue]:
    """`--demo`: its directory is the store, whatever else is configured."""
    if command_line.demo:
        yield from _flag("model_store", str(DEMO_MODEL_DIR), "--demo")
        yield from _flag("load_models", "ALL", "--demo")


def _request_size(environ: Mapping[str, str], report: Report) -> Iterator[RawValue]:
    """SageMaker's two limits for the request body, in bytes; they override everything."""
    size = environ.get("SAGEMAKER_MAX_REQUEST_SIZE", "")
    payload = environ.get("SAGEMAKER_MAX_PAYLOAD_IN_MB", "")
    if size and payload:
        report.warn("SAGEMAKER_MAX_PAYLOAD_IN_MB is ignored: SAGEMAKER_MAX_REQUEST_SIZE is set too")
    name, text, unit = ("SAGEMAKER_MAX_REQUEST_SIZE", size, 1)
    if payload and not size:
        name, text, unit = ("SAGEMAKER_MAX_PAYLOAD_IN_MB", payload, 1 << 20)
    if not text:
        return
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and 0 < len(digits) < 16 and int(digits):  # noqa: PLR2004
        origin = Origin(OriginKind.PLATFORM, name)
        yield RawValue("max_request_size", str(int(digits) * unit), origin)
    else:
        report.warn(f"{name} is ignored: {text!r} is not a whole number above 0")


def _serving_variables(environ: Mapping[str, str], table: OptionTable) -> Iterator[RawValue]:
    """Every `SERVING_*` that is not empty and not Kubernetes'."""
    for name, text in environ.items():
        if name.startswith(SERVING_PREFIX) and not table.is_kubernetes_made(name, text):
            key = name.removeprefix(SERVING_PREFIX).lower()
            yield from _variable(environ, name, OriginKind.VARIABLE, key)


def _serving_aliases(environ: Mapping[str, str]) -> Iterator[RawValue]:
    """Each older name of a `SERVING_*` variable, which comes first where both are set."""
    for alias in ALIAS_VARIABLES:
        if alias.target.startswith(SERVING_PREFIX):
            key = alias.target.removeprefix(SERVING_PREFIX).lower()
            yield from _variable(environ, alias.source, OriginKind.ALIAS, key)


def _upstream_flags(command_line: CommandLine) -> Iterator[RawValue]:
    """LMI's own flags `-m` and `-s`: store and model list."""
    yield from _flag("model_store", command_line.model_store, "--model-store")
    yield from _flag("load_models", command_line.models, "--models")
