"""The model that the settings name: a model id, or the content of the model store."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from lmi_vllm.config.properties import PropertiesFile, parse_properties
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import ModelSourceError, NoModelError
from lmi_vllm.messages import ModelArtifacts, Origin, OriginKind
from lmi_vllm.sources.archives import is_archive, without_archive_ending
from lmi_vllm.sources.local import (
    file_url_path,
    is_directory,
    is_file,
    looks_like_path,
    without_file_scheme,
)
from lmi_vllm.sources.model_store import (
    PROPERTIES_NAME,
    StoreFinding,
    is_none,
    search_store,
    with_unpacked,
)
from lmi_vllm.sources.table import Sources

_MODEL_FILES: Final = ("config.json", "params.json")
_CODE: Final = ("model.py", "requirements.txt")
# `djl://ai.djl.huggingface.<engine>/<hub id>`: the hub's model, converted for that engine.
_ZOO: Final = "djl://ai.djl.huggingface."
# Only with load_models, if no id is set.
_NAMES_DIRECTORY: Final = (OriginKind.HUB, OriginKind.FLAG)


def locate_model(settings: Settings, environ: Mapping[str, str]) -> ModelArtifacts | None:
    """The model to serve; None if the settings ask for a start without one.

    Raises ModelSourceError if there is no model, if there are several, or if it cannot be served.
    """
    finding = find_in_store(settings, environ)
    if finding.problem is not None:
        raise ModelSourceError(finding.problem)
    if finding.directory is not None:
        _refuse_adapter(finding.directory)
    if settings.model.model_id is not None:
        return _named_model(settings, settings.model.model_id, finding)
    if finding.url is not None:
        return _listed_model(settings, finding)
    if finding.archive is not None and finding.directory is None:
        place = str(finding.archive)  # `serve` unpacks it before the plan
        name, revision = clean_name(str(finding.name)), settings.model.revision
        return ModelArtifacts(name, place, place, revision=revision)
    if finding.directory is not None:
        return _model_of_directory(settings, finding.directory, finding.name)
    if settings.server.sagemaker_multi_model or is_none(settings.server.load_models):
        return None
    raise NoModelError(
        f"no model found: {settings.server.model_store} is empty or missing and no model "
        f"id is set; set HF_MODEL_ID, use --model, or start with load_models=NONE{_model_here()}"
    )


def _model_here() -> str:
    """What to type for the model in the working directory, which is not looked for."""
    here = Path.cwd()
    if (here / "serving.properties").is_file():
        return f"; for {here / 'serving.properties'} use --model-store ."
    return f"; for the model in {here} use --model ." if (here / "config.json").is_file() else ""


def find_in_store(settings: Settings, environ: Mapping[str, str]) -> StoreFinding:
    """The content of the configured store."""
    store = Path(settings.server.model_store)
    finding = search_store(store, settings.server.load_models)
    return with_unpacked(finding, environ)


def prefix_of_model(
    settings: Settings, named: str | None, environ: Mapping[str, str], sources: Sources
) -> str:
    """The URL of the store whose own serving.properties counts; empty for any other model.

    `named` is the model of the command line.
    """
    url = named or environ.get("HF_MODEL_ID", "").strip()
    finding = find_in_store(settings, environ)
    if settings.model.model_id is None and finding.url:
        url = finding.url
    return url if sources.is_store(url) and settings.properties is None else ""


def properties_of_prefix(
    url: str, environ: Mapping[str, str], sources: Sources
) -> PropertiesFile | None:
    """The serving.properties below a URL of a store; None without one.

    Raises:
        DownloadError: the store cannot be asked.
    """
    text = sources.read_text(url, PROPERTIES_NAME, environ)
    place = f"{url.rstrip('/*')}/{PROPERTIES_NAME}"
    return None if text is None else parse_properties(text, place)


def _named_model(settings: Settings, model_id: str, finding: StoreFinding) -> ModelArtifacts:
    """The model that a model id names: hub id, URL or path."""
    origin = settings.model.details.model_id.origin
    reference = _without_file_scheme(model_id, origin)
    path = Path(reference)
    is_named_by_id = origin.kind is not OriginKind.FILE
    directory = finding.directory
    if is_directory(path):
        _refuse_adapter(path)
        file = settings.properties
        is_below = file is None or Path(file.path).resolve().parent == path.resolve()
        # A store with code and packages alone is the model directory, as in LMI.
        has_code = directory is not None and any((directory / name).is_file() for name in _CODE)
        if is_named_by_id and is_below and not has_code:
            directory = path
    elif is_file(path):
        advice = "name its directory"
        if is_archive(path.name):
            advice = "put it into the model store, or name it with --models"
        raise ModelSourceError(f"model id {reference} ({origin}) is a file: {advice}")
    elif looks_like_path(reference):
        raise ModelSourceError(
            f"model id {mask_urls(reference)} ({origin}) is a path that does not exist"
        )
    name = finding.name
    if name is None:
        name = model_name(reference) if is_named_by_id or directory is None else directory.name
    return ModelArtifacts(
        name=clean_name(name),
        reference=reference,
        model=reference,
        revision=settings.model.revision,
        directory=directory,
    )


def _without_file_scheme(reference: str, origin: Origin) -> str:
    """The path of a `file:` URL, the hub id of DJL's model zoo; any other model id as it is."""
    if reference.startswith(_ZOO):
        _, _, hub_id = reference.removeprefix(_ZOO).partition("/")
        if not hub_id:
            raise ModelSourceError(
                f"model id {reference} ({origin}) names no hub id: write OWNER/NAME behind it"
            )
        return hub_id
    try:
        path = file_url_path(reference)
    except ValueError as error:
        raise ModelSourceError(f"model id ({origin}): {error}") from error
    return reference if path is None else str(path)


def with_files(
    model: ModelArtifacts, settings: Settings, local: Path, sources: Sources
) -> ModelArtifacts:
    """`model` once its files are at `local`.

    A prefix or archive in HF_MODEL_ID (or load_models) is the model directory itself if the store
    has none. One in option.model_id has weights only.
    """
    origin = settings.model.details.model_id.origin
    is_model_directory = sources.is_store(model.reference) and (
        origin.is_default or origin.kind in _NAMES_DIRECTORY
    )
    directory = local if model.directory is None and is_model_directory else model.directory
    return replace(model, model=str(local), directory=directory)


def _listed_model(settings: Settings, finding: StoreFinding) -> ModelArtifacts:
    """The model that load_models names by a URL."""
    url = _without_file_scheme(str(finding.url), settings.server.details.load_models.origin)
    if looks_like_path(url):
        raise ModelSourceError(
            f"load_models names {url}, which does not exist: name a path, a URL, ALL or NONE"
        )
    name = clean_name(finding.name or model_name(url))
    return ModelArtifacts(name=name, reference=url, model=url, revision=settings.model.revision)


def _model_of_directory(settings: Settings, directory: Path, name: str | None) -> ModelArtifacts:
    """The weights in the model directory itself, or in `model_dir`."""
    weights = directory
    if settings.model.model_dir is not None:
        weights = Path(without_file_scheme(settings.model.model_dir))
        if not is_directory(weights):
            stated = settings.model.details.model_dir.stated
            raise ModelSourceError(f"{stated} names a directory that does not exist")
    if not is_model_directory(weights):
        # A file that names an engine means a model beside it: then its absence is a mistake.
        is_meant = settings.server.details.engine.is_set
        raise (ModelSourceError if is_meant else NoModelError)(
            f"Failed to detect engine of the model: {weights} has no config.json, params.json, "
            f"*.safetensors or model.py, and no model id is set; set HF_MODEL_ID or "
            f"option.model_id"
        )
    return ModelArtifacts(
        name=clean_name(name or directory.name),
        reference=str(weights),
        model=str(weights),
        revision=settings.model.revision,
        directory=directory,
    )


def is_model_directory(directory: Path) -> bool:
    """Whether `directory` looks like a model directory."""
    if (directory / "model.py").is_file():
        return True
    return any((directory / name).is_file() for name in _MODEL_FILES) or any(
        directory.glob("*.safetensors")
    )


def _refuse_adapter(directory: Path) -> None:
    """Raise an error for a directory with a LoRA adapter and no model."""
    has_adapter = (directory / "adapter_config.json").is_file()
    if has_adapter and not any((directory / name).is_file() for name in _MODEL_FILES):
        raise ModelSourceError(
            f"{directory} holds a LoRA adapter (adapter_config.json) and no model: serve its base "
            f"model with option.enable_lora=true and put the adapter below adapters/"
        )


def model_name(reference: str) -> str:
    """The name a reference gives a model: all of a hub id, else the last path element."""
    is_hub_id = "://" not in reference and not is_directory(reference)
    last = reference if is_hub_id else reference.rstrip("/*").rsplit("/", 1)[-1]
    return without_archive_ending(last)


def clean_name(name: str) -> str:
    """`name` with everything but letters, digits and `_` turned into `_`."""
    return re.sub(r"\W", "_", name, flags=re.ASCII) or "model"
