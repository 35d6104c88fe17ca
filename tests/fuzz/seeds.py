"""Well-formed inputs to start from: random bytes alone never gets past the first check."""

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from lmi_vllm.demo import DEMO_MODEL_DIR

_ADAPTER = DEMO_MODEL_DIR / "adapters" / "json"
_CONFIG = (_ADAPTER / "adapter_config.json").read_bytes()
_WEIGHTS = (_ADAPTER / "adapter_model.safetensors").read_bytes()
_HEADER_BYTES = 8 + int.from_bytes(_WEIGHTS[:8], "little")

_BODIES = (
    {"inputs": "a", "parameters": {"max_new_tokens": 5, "stop": ["x"], "seed": "7"}},
    {"inputs": ["a", "b"], "adapters": ["x", ""], "parameters": {"best_of": 2, "do_sample": True}},
    {"inputs": "a", "stream": True, "parameters": {"top_n_tokens": 3, "logit_bias": {"5": 1.5}}},
    {"prompt": "a", "n": 2, "logit_bias": {"1": 2}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"requestType": "NEW_SESSION"},
    {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": {"type": "object"}}}},
)
_FORM = b'--x\r\nContent-Disposition: form-data; name="data"\r\n\r\n{"inputs": "a"}\r\n--x--\r\n'


def _zip(name: str, body: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(name, body)
    return file.getvalue()


def _tar(name: str, body: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as made:
        member = tarfile.TarInfo(name)
        member.type, member.size, member.linkname = kind, len(body), "/etc/passwd"
        made.addfile(member, io.BytesIO(body))
    return file.getvalue()


SEEDS: Final[Mapping[str, tuple[bytes, ...]]] = MappingProxyType(
    {
        "payload": (
            *(bytes([kind]) + json.dumps(body).encode() for body in _BODIES for kind in (1, 10)),
            b"\x02inputs,question\na,b\n",
            b"\x04data=a&model_name=b",
            b"\x05" + _FORM,
        ),
        "properties": (b"a=b\\\n  c\n# x\nd : \\u00e9\\t\n!y\noption.x \\= z\n",),
        "archive": (
            b"\x00" + _zip("a/b.txt", b"x" * 100),
            b"\x00" + _zip("../outside.txt", b"x"),
            b"\x01" + _tar("a/b.txt", b"x" * 100),
            b"\x01" + _tar("../outside.txt", b"x"),
            b"\x01" + _tar("/tmp/outside.txt", b"x"),
            b"\x01" + _tar("link", b"", tarfile.SYMTYPE),
            b"\x01" + _tar("fifo", b"", tarfile.FIFOTYPE),
        ),
        "weights": (_WEIGHTS[:_HEADER_BYTES], _WEIGHTS),
        "adapter": (_CONFIG + b"\0" + _WEIGHTS,),
        "headers": (
            b"X-Amzn-SageMaker-Custom-Attributes: a=b; x-synchronous=false;;=c\nHost: x",
            b"x-amzn-sagemaker-adapter-identifier: a\nX-Request-Id: \xc3\xa9",
        ),
        "rates": (b"5/PT1M", b"3/P1DT2H3M4.5S", b"4/90"),
    }
)
