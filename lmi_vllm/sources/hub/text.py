"""One small file of a hub repository as text, over plain HTTP; for checks before any download."""

import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from http.client import HTTPMessage
from typing import IO, Final
from urllib.parse import quote, urlsplit

from lmi_vllm.messages import ModelArtifacts

_HUB: Final = "https://huggingface.co"
_TIMEOUT_SECONDS: Final = 10.0
_LARGEST_BYTES: Final = 32 << 20


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


def hub_text(model: ModelArtifacts, name: str, environ: Mapping[str, str]) -> str | None:
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
