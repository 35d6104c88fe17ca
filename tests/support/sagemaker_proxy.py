"""SageMaker's runtime in small: `/endpoints/<name>/invocations` in front of one of our servers.

As the service does, it sends headers it knows on to `/invocations`, turns a model's error into a
ModelError, and sends a stream as PayloadPart events: one for each chunk that comes, or cut
anywhere, since the service promises nothing of lines. Requests without a SigV4 signature are 403.
"""

import http.client
import json
import re
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FORWARDED = ("Content-Type", "Accept", "X-Amzn-SageMaker-Custom-Attributes")
FORWARDED += ("X-Amzn-SageMaker-Session-Id", "X-Amzn-SageMaker-Adapter-Identifier")
CHUNK_BYTES = 1 << 16
SIGNATURE = re.compile(r"AWS4-HMAC-SHA256 Credential=\w+/\d{8}/[\w-]+/sagemaker/aws4_request, ")


@contextmanager
def sagemaker_proxy(url: str, part_bytes: int | None = None) -> Iterator[str]:
    """Serve the runtime's two operations over the server at `url`; yields its own URL.

    With `part_bytes` a stream is cut into parts of that length, wherever its rows end.
    """
    handler = type("Handler", (_Handler,), {"host": urlsplit(url).netloc, "part_bytes": part_bytes})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    host: str
    part_bytes: int | None

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not SIGNATURE.match(self.headers.get("Authorization", "")):
            text = {"message": "Request is missing Authentication Token"}
            kind = {"x-amzn-ErrorType": "MissingAuthenticationTokenException"}
            self._answer(403, json.dumps(text).encode(), kind)
            return
        connection = http.client.HTTPConnection(self.host, timeout=120)
        headers = {name: self.headers[name] for name in FORWARDED if name in self.headers}
        connection.request("POST", "/invocations", body, headers)
        answer = connection.getresponse()
        if answer.status >= 400:
            self._fail(answer.status, answer.read())
        elif self.path.endswith("/invocations-response-stream"):
            self._stream(answer)
        else:
            kind = {"Content-Type": answer.getheader("Content-Type") or ""}
            self._answer(200, answer.read(), kind)
        connection.close()

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, status: int, body: bytes) -> None:
        text = body.decode()
        document = {
            "ErrorCode": "CLIENT_ERROR_FROM_MODEL",
            "Message": f"Received client error ({status}) from model with message {text!r}",
            "OriginalMessage": text,
            "OriginalStatusCode": status,
        }
        kind = {"Content-Type": "application/json", "x-amzn-ErrorType": "ModelError"}
        self._answer(424, json.dumps(document).encode(), kind)

    def _stream(self, answer: http.client.HTTPResponse) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.amazon.eventstream")
        self.send_header("X-Amzn-SageMaker-Content-Type", answer.getheader("Content-Type") or "")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while part := self._part(answer):
            event = payload_part(part)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")

    def _part(self, answer: http.client.HTTPResponse) -> bytes:
        return answer.read(self.part_bytes) if self.part_bytes else answer.read1(CHUNK_BYTES)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def payload_part(payload: bytes) -> bytes:
    """Return bytes as one event of AWS's binary event stream."""
    headers = b"".join(
        struct.pack("!B", len(name)) + name + b"\x07" + struct.pack("!H", len(value)) + value
        for name, value in (
            (b":message-type", b"event"),
            (b":event-type", b"PayloadPart"),
            (b":content-type", b"application/octet-stream"),
        )
    )
    prelude = struct.pack("!II", 16 + len(headers) + len(payload), len(headers))
    prelude += struct.pack("!I", zlib.crc32(prelude))
    message = prelude + headers + payload
    return message + struct.pack("!I", zlib.crc32(message))
