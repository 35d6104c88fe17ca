"""An S3 store on loopback: moto's server behind a proxy that counts, pauses, cuts and refuses."""

import http.client
import io
import re
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote

import boto3

BUCKET = "models"
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIALOOPBACK",
    "AWS_SECRET_ACCESS_KEY": "loopback-secret",
    "AWS_REGION": "us-east-1",
}
_OF_A_CONNECTION = ("content-length", "connection", "date", "server", "transfer-encoding")


@dataclass(frozen=True)
class Refusal:
    """An S3 error answer."""

    status: int
    code: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Forwarded:
    """A request on its way to the store."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None


@dataclass
class FaultyStore:
    """A store behind the proxy: faults to play, requests to look at."""

    url: str
    backend: tuple[str, int]
    objects_sent: list[str] = field(default_factory=list)  # keys, one entry for each GET
    signed: list[bool] = field(default_factory=list)
    payers: list[str] = field(default_factory=list)
    cuts_left: int = 0  # so many object transfers break off halfway
    refusal: Refusal | None = None  # the answer to every request
    refuse_objects: Refusal | None = None  # the answer to every GET of an object
    pause: threading.Event | None = None  # large objects stop halfway until it is set
    pause_lists: threading.Event | None = None  # listings are not answered until it is set
    stall: threading.Event | None = None  # nothing is answered until it is set
    listed_size: int | None = None  # what listings claim every object's size to be
    wrong_bytes_left: int = 0  # so many object transfers are altered on the way
    lost_answers_left: int = 0  # so many writes are carried out, and their answers lost
    ignores_conditions: bool = False  # as stores without conditional writes do

    def object_of(self, path: str, query: str) -> str | None:
        """Return the key that a GET asks for; None for a listing."""
        if path.count("/") < 2 or path.endswith("/") or "list-type" in query:
            return None
        return unquote(path.split("/", 2)[2])

    def forwarded(self, asked: Forwarded) -> Forwarded:
        """Return what the store is asked with."""
        return asked

    def headers_of(self, method: str, body: bytes) -> Mapping[str, str]:
        """Return what the answer lacks: nothing, where the store speaks the client's protocol."""
        return {}

    def forget(self) -> None:
        """Forget all faults and requests."""
        self.objects_sent.clear()
        self.signed.clear()
        self.payers.clear()
        self.cuts_left = self.wrong_bytes_left = self.lost_answers_left = 0
        self.refusal = self.refuse_objects = self.pause = self.listed_size = None
        self.pause_lists = self.stall = None
        self.ignores_conditions = False


@dataclass
class S3Server(FaultyStore):
    """A store of moto to fill."""

    @property
    def environ(self) -> dict[str, str]:
        """The variables that lead a client here."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.url}

    def put(self, bodies: Mapping[str, bytes], part_bytes: int | None = None) -> None:
        """Store `bodies` by key, as multipart uploads when `part_bytes` is given."""
        client = self.client
        for key, body in bodies.items():
            if part_bytes:
                config = boto3.s3.transfer.TransferConfig(
                    part_bytes, multipart_chunksize=part_bytes
                )
                client.upload_fileobj(io.BytesIO(body), BUCKET, key, Config=config)
            else:
                client.put_object(Bucket=BUCKET, Key=key, Body=body, ACL="public-read")

    def delete(self, key: str) -> None:
        """Remove one object."""
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def reset(self) -> None:
        """Empty the store and forget all faults."""
        host, port = self.backend
        request = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=10).close()
        self.forget()
        self.client.create_bucket(Bucket=BUCKET)

    @cached_property
    def client(self) -> Any:
        """A client that speaks to moto without the proxy."""
        host, port = self.backend
        return boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            region_name=KEYS["AWS_REGION"],
        )


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a store with one empty bucket."""
    # A process of its own: moto imports flask, whose proxies an engine forked from here trips over.
    backend = ("127.0.0.1", free_port())
    moto = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", backend[0], "-p", str(backend[1])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    store = S3Server("", backend)
    try:
        wait_until_open(backend)
        with behind_proxy(store):
            store.reset()
            yield store
    finally:
        moto.kill()
        moto.wait()


@contextmanager
def behind_proxy(store: FaultyStore) -> Iterator[None]:
    """Run the proxy, whose URL the store gets."""
    handler = type("Handler", (_Proxy,), {"store": store})
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    proxy.daemon_threads = True
    store.url = f"http://127.0.0.1:{proxy.server_address[1]}"
    thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        for pause in filter(None, (store.pause, store.stall)):
            pause.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join()


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_open(address: tuple[str, int], seconds: float = 60) -> None:
    """Return once something listens there."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(address, 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def tar_gz(files: Mapping[str, bytes]) -> bytes:
    """Return a .tar.gz of `files`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, body in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return buffer.getvalue()


def zip_file(files: Mapping[str, bytes]) -> bytes:
    """Return a .zip of `files`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return buffer.getvalue()


class _Proxy(BaseHTTPRequestHandler):
    """Hands every request on to the store and plays its faults."""

    store: ClassVar[FaultyStore]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Listings and objects."""
        path, _, query = self.path.partition("?")
        key = self.store.object_of(path, query)
        is_object = key is not None
        self._note(key)
        if self.store.pause_lists and not is_object:
            self.store.pause_lists.wait(20)
        refusal = self.store.refusal or (self.store.refuse_objects if is_object else None)
        if refusal:
            self._refuse(refusal)
        else:
            self._forward(is_object)

    def do_HEAD(self) -> None:
        """Objects and buckets."""
        self._note()
        if self.store.refusal:
            self._refuse(self.store.refusal)
        else:
            self._forward(False)

    def do_PUT(self) -> None:
        """Objects that are written."""
        self._note()
        self._write()

    def do_POST(self) -> None:
        """Several objects that are removed."""
        self._note()
        self._write()

    def do_DELETE(self) -> None:
        """Objects that are removed."""
        self._note()
        self._write()

    def _write(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.store.refusal:
            self._refuse(self.store.refusal)
        else:
            self._forward(False, body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""

    def _note(self, key: str | None = None) -> None:
        if self.store.stall:
            self.store.stall.wait(120)
        self.store.signed.append("authorization" in self.headers)
        self.store.payers.append(self.headers.get("x-amz-request-payer", ""))
        if key is not None:
            self.store.objects_sent.append(key)

    def _forward(self, is_object: bool, sent: bytes | None = None) -> None:
        connection = http.client.HTTPConnection(*self.store.backend, timeout=20)
        conditions = ("if-match", "if-none-match") if self.store.ignores_conditions else ()
        dropped = ("host", *conditions)
        headers = {name: value for name, value in self.headers.items()
                   if name.lower() not in dropped}  # fmt: skip
        asked = self.store.forwarded(Forwarded(self.command, self.path, headers, sent))
        connection.request(asked.method, asked.path, body=asked.body, headers=asked.headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if self.command == "PUT" and self.store.lost_answers_left > 0:
            self.store.lost_answers_left -= 1
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if self.store.listed_size is not None and b"<ListBucketResult" in body:
            size = b"<Size>%d</Size>" % self.store.listed_size
            body = re.sub(rb"<Size>\d+</Size>", size, body)
        if is_object and self.store.wrong_bytes_left > 0:
            self.store.wrong_bytes_left -= 1
            body = b"X" * len(body)
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_A_CONNECTION:
                self.send_header(name, value)
        for name, value in self.store.headers_of(self.command, body).items():
            self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        self._send_body(body, is_object)

    def _send_body(self, body: bytes, is_object: bool) -> None:
        middle = len(body) // 2
        self.wfile.write(body[:middle])
        if self.store.pause and is_object and len(body) > 1000:
            self.store.pause.wait(20)
        if self.store.cuts_left > 0 and is_object:
            self.store.cuts_left -= 1
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(body[middle:])

    def _refuse(self, refusal: Refusal) -> None:
        text = f"<Error><Code>{refusal.code}</Code><Message>no</Message></Error>".encode()
        self.send_response(refusal.status)
        for name, value in refusal.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)
