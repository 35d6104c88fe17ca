"""A hub on loopback: the HTTP calls that huggingface_hub makes to fetch a model, and its faults."""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

COMMIT = "1" * 40
LARGE_BYTES = 1024  # from here on a file is kept in LFS, as on the real hub
SIGNATURE = "X-Amz-Signature=verysecretsignature"


@dataclass
class Repository:
    """One model: its files, who may read it, and the revisions it has."""

    files: dict[str, bytes]
    token: str | None = None  # readable only with this one
    is_gated: bool = False
    commit: str = COMMIT
    revisions: dict[str, str] = field(default_factory=dict)  # branch or tag -> commit
    announced_sizes: dict[str, int] = field(default_factory=dict)  # where they differ
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)  # earlier commit -> files

    def push(self, commit: str, files: dict[str, bytes]) -> None:
        """Make this the newest commit; the present one stays."""
        self.history[self.commit] = self.files
        self.commit, self.files = commit, files

    def at(self, revision: str | None) -> "Repository":
        """The repository as it was at a commit; as it is now at any other revision."""
        files = self.history.get(revision or "")
        return self if files is None else replace(self, commit=revision or "", files=files)

    def size(self, name: str) -> int:
        """What the listing says the size of `name` is."""
        return self.announced_sizes.get(name, len(self.files[name]))


@dataclass
class HubServer:
    """What the tests see: repositories to serve, faults to play, requests to look at."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # method, path
    authorizations: list[str] = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)  # starts of ranges asked for
    cuts_left: int = 0  # so many transfers of large files break off halfway
    failures_left: int = 0  # so many transfers of large files answer 500
    refusal: tuple[int, dict[str, str]] | None = None  # status and headers of every answer
    refusals_left: int | None = None  # so many of these; None: all
    chunk_pause: threading.Event | None = None  # large files stop halfway until it is set

    def paths(self, method: str) -> list[str]:
        """The paths asked for with `method`, in order."""
        return [path for verb, path in self.requests if verb == method]


@contextmanager
def hub_server(**repositories: Repository) -> Iterator[HubServer]:
    """Run a hub that serves `repositories` (`acme__tiny` stands for `acme/tiny`)."""
    hub = HubServer()
    hub.repositories = {name.replace("__", "/"): repo for name, repo in repositories.items()}
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        if hub.chunk_pause:
            hub.chunk_pause.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answers like huggingface.co: model info, file tree, resolve with LFS redirects, ranges."""

    hub: ClassVar[HubServer]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self._route()

    def do_GET(self) -> None:
        """Answer."""
        self._route()

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""

    def _route(self) -> None:
        path, _, self.query = self.path.partition("?")
        self.hub.requests.append((self.command, path))
        self.hub.authorizations.append(self.headers.get("authorization", ""))
        if self.hub.refusals_left == 0:
            self.hub.refusal = None
        if self.hub.refusal is not None:
            if self.hub.refusals_left is not None:
                self.hub.refusals_left -= 1
            self._send(self.hub.refusal[0], b"", self.hub.refusal[1])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path):
            self._tree(*match.groups())
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._info(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        elif match := re.fullmatch(r"/lfs/([^/]+/[^/]+)/(.+)", path):
            self._large_file(*match.groups())
        else:
            self._refuse(404, "EntryNotFound")

    def _opened(self, name: str, revision: str | None) -> Repository | None:
        """The repository, or None once a refusal has been sent."""
        repository = self.hub.repositories.get(name)
        allowed = repository and repository.token in (None, self._token())
        if repository is None or (not allowed and not repository.is_gated):
            self._refuse(401 if not self._token() else 404, "RepoNotFound")
        elif not allowed and repository.is_gated:
            self._refuse(401 if not self._token() else 403, "GatedRepo")
        elif revision not in (
            None, "main", repository.commit, *repository.revisions, *repository.history
        ):  # fmt: skip
            self._refuse(404, "RevisionNotFound")
        else:
            return repository.at(revision)
        return None

    def _token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    def _info(self, name: str, revision: str | None) -> None:
        if repository := self._opened(name, revision):
            siblings = [self._sibling(repository, file) for file in repository.files]
            commit = repository.revisions.get(revision or "main", repository.commit)
            self._json({"id": name, "sha": commit, "siblings": siblings})

    def _sibling(self, repository: Repository, file: str) -> dict[str, object]:
        entry: dict[str, object] = {"rfilename": file}
        if "blobs=" in self.query:
            entry |= {"size": repository.size(file), "blobId": _git_id(repository, file)}
            if _is_large(repository, file):
                entry["lfs"] = {
                    "sha256": _sha256(repository, file),
                    "size": repository.size(file),
                    "pointerSize": 134,
                }
        return entry

    def _tree(self, name: str, revision: str) -> None:
        if repository := self._opened(name, revision):
            self._json([self._tree_entry(repository, file) for file in repository.files])

    def _tree_entry(self, repository: Repository, file: str) -> dict[str, object]:
        size = repository.size(file)
        entry: dict[str, object] = {
            "type": "file",
            "path": file,
            "size": size,
            "oid": _git_id(repository, file),
        }
        if _is_large(repository, file):
            entry["lfs"] = {"oid": _sha256(repository, file), "size": size, "pointerSize": 134}
        return entry

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._opened(name, revision)
        if repository is None:
            return
        if file not in repository.files:
            self._refuse(404, "EntryNotFound")
            return
        body = repository.files[file]
        headers = {"X-Repo-Commit": repository.commit}
        if not _is_large(repository, file):
            headers["ETag"] = f'"{_git_id(repository, file)}"'
            self._send(200, body, headers)
            return
        headers["X-Linked-Size"] = str(repository.size(file))
        headers["X-Linked-ETag"] = f'"{_sha256(repository, file)}"'
        # The real hub redirects to another host with a signed URL; another name will do here.
        host = self.hub.url.replace("127.0.0.1", "localhost")
        headers["Location"] = f"{host}/lfs/{name}/{file}?{SIGNATURE}&commit={repository.commit}"
        self._send(302, b"", headers)

    def _large_file(self, name: str, file: str) -> None:
        hub = self.hub
        if hub.failures_left > 0:
            hub.failures_left -= 1
            self._send(500, b"", {})
            return
        commit = self.query.rpartition("commit=")[2]
        body = hub.repositories[name].at(commit).files[file]
        start = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
            hub.resumed_from.append(start)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        middle = (start + len(body)) // 2
        self.wfile.write(body[start:middle])
        if hub.chunk_pause:
            hub.chunk_pause.wait(20)
        if hub.cuts_left > 0:
            hub.cuts_left -= 1
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(body[middle:])

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _is_large(repository: Repository, file: str) -> bool:
    return len(repository.files[file]) >= LARGE_BYTES


def _sha256(repository: Repository, file: str) -> str:
    return hashlib.sha256(repository.files[file]).hexdigest()


def _git_id(repository: Repository, file: str) -> str:
    body = repository.files[file]
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()
