"""A Hugging Face Hub on the loopback address: as much of its HTTP API as streaming a gated dataset needs.

As on the real one, its own address redirects to a second one, the storage, for large files (here *.parquet); the
storage serves ranges of bytes and is sent no token. Every answer is written down, and answers can be made to fail.
"""

import json
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_someone_who_accepted_the_terms"
NEWCOMER = "hf_of_someone_who_did_not"
LIMITED = "hf_that_may_not_read_gated_repositories"


@dataclass(frozen=True)
class Answer:
    """A line of the log; the bytes from `start` to `end` of the file were sent."""

    kind: str  # auth-check, revision, tree, resolve or storage
    file: str
    status: int
    start: int
    end: int
    token: str | None


@dataclass
class Fault:
    """What goes wrong with requests of a `kind`, for files with `file` in their name, and how many times.

    `what` is a status, "drop" (the connection is closed before the end of what was announced), "short" (half of what
    was asked for is announced and sent), "whole" (all of the file is sent where a range was asked for), "silence" (no
    answer at all), "drip" (the body comes byte by byte) or "drip head" (all of it does).
    """

    kind: str
    what: int | str
    times: float = float("inf")
    file: str = ""


class HubServer:
    """A context manager that serves what is published.

    `pause` are seconds before every answer, `rate` the bytes a second that a connection gets; `notice` is called with
    every answer, before it is sent.
    """

    def __init__(self):
        self.datasets, self.commits, self.fault, self.log = {}, {}, None, []
        self.pause, self.rate, self.notice = 0, float("inf"), lambda _: None
        self._lock, self.closed = threading.Lock(), threading.Event()
        self._servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), type(kind.__name__, (kind,), {"hub": self}))
            for kind in (_Hub, _Storage)
        ]
        self.endpoint, self.storage = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def __enter__(self):
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closed.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def publish(self, repo, files):
        """Make a repository of {path: content}; other content makes another commit."""
        self.datasets[repo] = files
        self.commits[repo] = sha1(repr([repo, *map(_oid, files.values())]).encode()).hexdigest()

    def fail(self, *args, **options):
        """Let something go wrong from now on; the log begins anew."""
        self.fault, self.log = Fault(*args, **options), []

    def recover(self):
        """All is well again; the log begins anew."""
        self.fault, self.log = None, []

    def fault_of(self, kind, file):
        with self._lock:
            fault = self.fault
            if fault is None or fault.kind != kind or fault.file not in file or fault.times <= 0:
                return None
            fault.times -= 1
            return fault.what

    def record(self, answer):
        with self._lock:
            self.log.append(answer)

    def requests(self, kind=""):
        """The number of requests for each file."""
        return Counter(answer.file for answer in self.log if kind in answer.kind)

    def ranges(self, file):
        """The byte ranges of a large file that were sent."""
        return [(answer.start, answer.end) for answer in self.log if (answer.kind, answer.file) == ("storage", file)]

    def served(self, file):
        """The number of bytes of a large file that were sent."""
        return sum(end - start for start, end in self.ranges(file))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body leave together

    def log_message(self, *_):
        """Nothing on the terminal."""

    def do_GET(self):
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        self.kind, self.repo, self.file = self.understand(unquote(urlsplit(self.path).path))
        self.what = self.hub.fault_of(self.kind, self.file)
        self.hub.closed.wait(self.hub.pause)
        if self.what == "silence":
            return self.drip([b""], 60)
        if self.what == "drip head":
            return self.drip(b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 600)
        if isinstance(self.what, int):
            return self.send(self.what, b'{"error": "injected"}', ("Retry-After", "7"))
        return self.reply()

    do_HEAD = do_GET  # noqa: N815

    def send(self, status, body=b"", *headers, start=0):
        """Send an answer, or what the fault leaves of it."""
        if self.what == "short":
            body = body[: len(body) // 2]
        dropped = self.what == "drop"
        sent = body[: len(body) // 2] if dropped else body
        answer = Answer(self.kind, self.file, status, start, start + len(sent), self.token)
        self.hub.record(answer)
        self.hub.notice(answer)
        self.close_connection = dropped
        if dropped and (self.command == "HEAD" or not body):
            return  # there is no body to break off: no answer at all
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", len(body))):
            self.send_header(name, str(value))
        self.end_headers()
        if self.what == "drip":
            self.drip(sent)
        elif self.command != "HEAD":
            for at in range(0, len(sent), 2**16):
                self.wfile.write(sent[at : at + 2**16])
                self.hub.closed.wait(min(2**16, len(sent) - at) / self.hub.rate)

    def drip(self, content, seconds=0.1):
        """Send a piece now and then, until all is well again."""
        self.close_connection, fault = True, self.hub.fault
        with suppress(OSError):
            for piece in content:
                self.wfile.write(piece if isinstance(piece, bytes) else bytes([piece]))
                self.wfile.flush()
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    if self.hub.closed.wait(0.05) or self.hub.fault is not fault:
                        return

    def refuse(self, status, words, *headers):
        self.send(status, json.dumps({"error": words}).encode(), ("X-Error-Message", words), *headers)


class _Hub(_Handler):
    """The Hub's own address: who may read what, what there is, small files, and where the large ones are."""

    def understand(self, path):
        if found := re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)/([a-z-]+)(?:/[^/]+)?(?:/(.+))?", path):
            return found[2], found[1], found[3] or ""
        if found := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return "resolve", found[1], found[2]
        return "unknown", "", path

    def reply(self):
        if self.token not in (None, TOKEN, NEWCOMER, LIMITED):
            self.refuse(401, "Invalid credentials in Authorization header")
        elif self.token == LIMITED:
            self.refuse(403, "Please enable access to public gated repositories in your fine-grained token settings")
        elif self.repo not in self.hub.datasets:
            self.refuse(404 if self.token else 401, "Repository not found", ("X-Error-Code", "RepoNotFound"))
        elif self.token != TOKEN:
            self.refuse(403 if self.token else 401, "Access is restricted", ("X-Error-Code", "GatedRepo"))
        else:
            {"auth-check": self.welcome, "revision": self.info, "tree": self.tree}.get(self.kind, self.resolve)()

    def json(self, value):
        self.send(200, json.dumps(value).encode(), ("Content-Type", "application/json"))

    def welcome(self):
        self.json({})

    def info(self):
        files = [{"rfilename": path} for path in self.hub.datasets[self.repo]]
        self.json({"id": self.repo, "sha": self.hub.commits[self.repo], "gated": "auto", "siblings": files})

    def tree(self):
        """What lies in a folder."""
        prefix, found = f"{self.file}/" if self.file else "", {}
        for path, content in self.hub.datasets[self.repo].items():
            if path.startswith(prefix):
                name, *rest = path[len(prefix) :].split("/")
                kind, size = ("directory", 0) if rest else ("file", len(content))
                found[name] = {"type": kind, "path": prefix + name, "oid": _oid(content), "size": size}
        self.json(list(found.values()))

    def resolve(self):
        commit = ("X-Repo-Commit", self.hub.commits[self.repo])
        content = self.hub.datasets[self.repo].get(self.file)
        if content is None:
            self.refuse(404, "Entry not found", commit, ("X-Error-Code", "EntryNotFound"))
        elif self.file.endswith(".parquet"):
            self.send(302, b"", commit, ("Location", f"{self.hub.storage}/{self.repo}/{self.file}"))
        else:
            self.send(200, content, commit, ("ETag", f'"{_oid(content)}"'))


class _Storage(_Handler):
    """Where the large files are: any range of bytes, for whoever has the address."""

    def understand(self, path):
        owner, name, file = path[1:].split("/", 2)
        return "storage", f"{owner}/{name}", file

    def reply(self):
        content = self.hub.datasets[self.repo][self.file]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked or self.what == "whole":
            return self.send(200, content)
        start, end = int(asked[1]), min(int(asked[2]) + 1, len(content))
        if start >= end:
            return self.send(416)
        return self.send(
            206, content[start:end], ("Content-Range", f"bytes {start}-{end - 1}/{len(content)}"), start=start
        )


def _oid(content):
    return sha1(content).hexdigest()
