"""The model's own config.json and the size of its weights, from a directory or over the network.

Only files of a few kilobytes are read; no weight is ever fetched here.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Final
from urllib.parse import quote, urlsplit

from lmi_vllm.errors import DownloadError
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.startup.masking import mask_urls
from lmi_vllm.startup.model_store import is_directory

_HUB: Final = "https://huggingface.co"
_TIMEOUT_SECONDS: Final = 10.0
_LARGEST_BYTES: Final = 32 << 20
_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is known of the model's files; `problem` says why something is not."""

    config: Mapping[str, object] | None = None
    weight_bytes: int | None = None
    problem: str = ""


def read_model_files(
    model: ModelArtifacts, environ: Mapping[str, str], *, is_offline: bool = False
) -> ModelFiles:
    """config.json and the weights' size of `model`; never raises."""
    if is_directory(model.model):
        return read_directory(Path(model.model))
    if is_offline:
        return ModelFiles(problem=f"{mask_urls(model.model)} is not local and --offline was given")
    if model.model.startswith("s3://"):
        return _from_texts(lambda name: _s3_text(model.model, name, environ))
    return _from_texts(lambda name: _hub_text(model, name, environ))


def read_directory(directory: Path) -> ModelFiles:
    """The files of a local model."""
    files = _from_texts(
        lambda name: (directory / name).read_text("utf-8") if (directory / name).is_file() else None
    )
    for pattern in _WEIGHT_PATTERNS:
        size = sum(path.stat().st_size for path in directory.glob(pattern))
        if size:
            return ModelFiles(files.config, size, files.problem)
    return files


def _from_texts(read: Callable[[str], str | None]) -> ModelFiles:
    """The files, each read by name; None stands for a file that does not exist."""
    try:
        text = read("config.json")
        if text is None:
            return ModelFiles(problem="the model has no config.json")
        config = json.loads(text)
        if not isinstance(config, dict):
            return ModelFiles(problem="config.json is no JSON object")
        index = read("model.safetensors.index.json")
        return ModelFiles(config, _indexed_size(index))
    except (OSError, ValueError) as error:
        return ModelFiles(problem=f"config.json cannot be read: {mask_urls(str(error))}")


def _indexed_size(index: str | None) -> int | None:
    """The size that a safetensors index states."""
    metadata = json.loads(index).get("metadata", {}) if index else {}
    size = metadata.get("total_size")
    return int(size) if isinstance(size, int | float) else None


def _s3_text(prefix: str, name: str, environ: Mapping[str, str]) -> str | None:
    """One object below the prefix."""
    from lmi_vllm.startup.downloads import fetch_text  # noqa: PLC0415 - boto3 only when used

    try:
        return fetch_text(f"{prefix.rstrip('*').rstrip('/')}/{name}", environ)
    except DownloadError as error:
        raise OSError(error.text) from error


class _SameHostRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects without sending the token to another host."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage | Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        """The next request, without credentials where the host changes."""
        request = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if request is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")
        return request


def _hub_text(model: ModelArtifacts, name: str, environ: Mapping[str, str]) -> str | None:
    """One small file of a hub repository."""
    endpoint = (environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    url = (
        f"{endpoint}/{quote(model.model)}/resolve/{quote(model.revision or 'main', safe='')}/{name}"
    )
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"HF_ENDPOINT {endpoint} is no http address")
    request = urllib.request.Request(url)
    token = environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(_SameHostRedirects)
    try:
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as reply:
            data: bytes = reply.read(_LARGEST_BYTES)
            return data.decode("utf-8")
    except urllib.error.HTTPError as error:
        if error.code == 404:  # noqa: PLR2004 - not found
            return None
        raise
