"""Where an adapter's files are: `src` as a client or a folder gives it -> a local directory."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lmi_vllm.errors import AdapterConflictError, AdapterRefusedError, DownloadError
from lmi_vllm.startup.downloads import fetch_model

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def resolve_adapter_source(src: str, environ: Mapping[str, str]) -> str:
    """Return the local directory of an adapter source (adapters-api.md 6).

    Raises:
        AdapterConflictError: a URL scheme that is never fetched.
        AdapterRefusedError: the folder is missing or holds no adapter; or it cannot be fetched.
    """
    scheme = urlsplit(src).scheme if "://" in src else ""
    if scheme == "s3":
        try:
            path = fetch_model(src, environ=environ)
        except DownloadError as error:
            raise AdapterRefusedError(error.text) from error
    elif scheme == "file":
        path = Path(unquote(urlsplit(src).path))
    elif scheme:
        raise AdapterConflictError(f"URL adapters are not currently supported: {scheme}:// sources")
    else:
        path = Path(src)
    return str(_checked(path.absolute(), src))


def local_adapters(directory: Path | None, folder: str) -> dict[str, Path]:
    """Return name -> path of the adapters below a model directory, in name order."""
    root = directory / folder if directory is not None else None
    if root is None or not root.is_dir():
        return {}
    return {
        child.name: child.absolute()
        for child in sorted(root.iterdir())
        if child.is_dir() and not child.name.startswith(".")
    }


def _checked(path: Path, src: str) -> Path:
    if not path.is_dir():
        raise AdapterRefusedError(
            f"Only local LoRA models are supported. {src} is not a valid path"
        )
    if not (path / "adapter_config.json").is_file():
        raise AdapterRefusedError(f"{src} has no adapter_config.json: it is not a LoRA adapter")
    if not any((path / name).is_file() for name in WEIGHT_FILES):
        raise AdapterRefusedError(f"{src} has none of {', '.join(WEIGHT_FILES)}")
    return path
