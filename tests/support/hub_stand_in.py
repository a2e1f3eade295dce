"""A stand-in for the Hugging Face hub: serves what huggingface_hub requests on a local port, and counts every byte."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_reader"
HEADER_BYTES = 100_000  # that are requested of a file to parse its header
PIECE = 1 << 16  # bytes that are sent at once


@dataclass
class Repository:
    folders: dict[str, Path]  # by commit
    refs: dict[str, str]  # the commit of each branch and tag
    gated: bool = False


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    served: Counter = field(default_factory=Counter)  # bytes of bodies, by file name
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range
    gives_parts: bool = True
    break_after: int | None = None  # truncate the next file response after this many bytes
    answers: dict[str, bytes] = field(default_factory=dict)  # other answers of the API, by the repository's name
    headers: dict[str, str] = field(default_factory=dict)  # other headers of files
    status: int | None = None  # of all answers, if it is no other
    speaks: threading.Event = field(default_factory=threading.Event)  # answers wait until it is set

    def __post_init__(self):
        self.speaks.set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def publish(self, name: str, folder: Path, revision: str = "main", gated: bool = False) -> str:
        """Publish a folder; returns its commit."""
        commit = hashlib.sha1(f"{name} {revision} {folder}".encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, {}))
        repository.folders[commit], repository.refs[revision], repository.gated = folder, commit, gated
        repository.refs.setdefault("main", commit)
        return commit

    def clear(self) -> None:
        self.repositories.clear()
        self.break_after = None
        self.answers.clear()
        self.headers.clear()
        self.status = None
        self.reset_counts()

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Answers wait for the end of this context."""
        self.speaks.clear()
        try:
            yield
        finally:
            self.speaks.set()

    def reset_counts(self) -> None:
        self.served.clear()
        self.requests.clear()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.speaks.wait()
        if self.hub.status is not None:
            return self.fail(self.hub.status, "")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            name, kind, revision = match[1], match[2] or "revision", match[3] or "main"
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            name, kind, revision = match[1], "file", match[2]
        else:
            return self.fail(404, "EntryNotFound")
        if name in self.hub.answers and kind != "file":
            return self.send_json(self.hub.answers[name])
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.fail(401, "RepoNotFound")
        if repository.gated and kind == "file" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.fail(403, "GatedRepo")
        commit = repository.refs.get(revision, revision)
        folder = repository.folders.get(commit)
        if folder is None:
            return self.fail(404, "RevisionNotFound")
        files = {f.relative_to(folder).as_posix(): f for f in sorted(folder.rglob("*")) if f.is_file()}
        if kind == "revision":
            listed = [{"rfilename": f, "size": p.stat().st_size} for f, p in files.items()]
            self.send_json({"id": name, "sha": commit, "siblings": listed})
        elif kind == "tree":
            sizes = {f: {"size": p.stat().st_size, "oid": _oid(p)} for f, p in files.items()}
            self.send_json([{"type": "file", "path": f, **size} for f, size in sizes.items()])
        elif match[3] in files:
            self.send_file(match[3], files[match[3]], commit)
        else:
            self.fail(404, "EntryNotFound", {"X-Repo-Commit": commit})

    do_HEAD = do_GET

    def head(self, status, length, headers):
        self.send_response(status)
        for name, value in {"Content-Length": length, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()

    def fail(self, status, code, headers={}):  # noqa: B006
        self.head(status, 0, {"X-Error-Code": code, "X-Error-Message": f"{code} (stand-in)", **headers})

    def send_json(self, value):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.head(200, len(body), {"Content-Type": "application/json"})
        self.body("api", body)

    def send_file(self, name, file, commit):
        headers = {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        size = stop = len(data := file.read_bytes())
        if asked := self.hub.gives_parts and self.headers.get("Range"):
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", asked).groups()
            stop = min(int(last) + 1 if last else size, size)
            data = data[int(first) : stop]
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{size}"
        self.head(206 if asked else 200, len(data), headers | self.hub.headers)
        self.body(name, data, breakable=True)

    def body(self, name, data, breakable=False):
        if self.command == "HEAD":
            return
        if breakable and self.hub.break_after is not None and len(data) > self.hub.break_after:
            data, self.hub.break_after = data[: self.hub.break_after], None
            self.close_connection = True
        try:
            for i in range(0, len(data), PIECE):
                self.wfile.write(data[i : i + PIECE])
                self.hub.served[name] += len(data[i : i + PIECE])
        except ConnectionError:  # the client has closed the connection
            self.close_connection = True


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
