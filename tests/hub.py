"""A small Hugging Face hub on the loopback: the endpoints of downloads and small uploads, over files in memory or disk.

    with Hub({"org/name": Repo({"main": folder})}) as hub:
        ...  # HF_ENDPOINT=hub.url

It answers as huggingface.co does where clients look: commit and ETag headers, and the error codes that distinguish a
missing repository, revision or file and a gated repository.
"""

import hashlib
import json
import re
from base64 import b64decode
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Files = Path | Mapping[str, bytes]

API = re.compile(r"/api/(?:models|datasets)/(?P<repo>[^/]+(?:/[^/]+)?)")
CUT = 0  # the fault of a download that is cut off
RESOLVE = re.compile(r"(?:/datasets)?/(?P<repo>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass(frozen=True)
class Repo:
    """A repository: its content at each revision, and the token that opens it (None: anybody may read it)."""

    revisions: Mapping[str, Files]
    gate: str | None = None

    @cached_property
    def commits(self) -> dict[str, dict[str, bytes]]:
        """The content of each file, by commit hash and file name."""
        return {_commit(name): _read(files) for name, files in self.revisions.items()}

    def commit(self, revision: str) -> str:
        """The commit that a branch, a tag or a commit hash names."""
        commit = _commit(revision) if revision in self.revisions else revision
        if commit not in self.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit


def _commit(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


def _read(files: Files) -> dict[str, bytes]:
    if isinstance(files, Path):
        paths = (path for path in sorted(files.rglob("*")) if path.is_file())
        return {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
    return dict(files)


class Hub:
    """The server, running in a thread between `__enter__` and `__exit__`. `repos` may change while it runs.

    `faults` maps a file name to the faults of its next downloads: a status, or CUT for a download that is cut off.
    """

    def __init__(self, repos: Mapping[str, Repo] | None = None) -> None:
        self.repos: dict[str, Repo] = dict(repos or {})
        self.requests: deque[str] = deque(maxlen=1000)  # "GET /path", oldest first
        self.sent: Counter[str] = Counter()  # name of a file → bytes of it that were sent
        self.sends_parts = True  # whether a range of bytes is sent alone
        self.faults: dict[str, list[int]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Refused(Exception):
    """An error status, with the hub's code and message, and further headers."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    timeout = 10  # a connection left open ends its thread

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = url.path  # unquoted part by part: a revision such as refs/pr/1 holds slashes
        self.hub.requests.append(f"{self.command} {unquote(path)}")
        try:
            if (match := RESOLVE.fullmatch(path)) is not None:
                self._file(match["repo"], unquote(match["revision"]), unquote(match["file"]))
            elif (match := self._api_match(path)) is not None:
                self._api(match["repo"], path[match.end() :].strip("/"), parse_qs(url.query))
            else:
                self._send(404, {"error": "not found"})
        except _Refused as error:
            self._send(error.status, {"error": error.headers["X-Error-Message"]}, error.headers)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Create a repository, or commit files to it, which come with the request; a token must be sent."""
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {unquote(path)}")
        body = self._body()
        match = API.match(path)
        if self._token() is None:
            self._send(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            known = self.hub.repos.setdefault(name, Repo({"main": {}}))
            self._send(409 if known.commits[_commit("main")] else 200, {"url": f"{self.hub.url}/datasets/{name}"})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif match is not None and "/preupload/" in path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in files]
            self._send(200, {"files": modes})
        elif match is not None and "/commit/" in path:
            operations = [json.loads(line) for line in body.splitlines()]
            files = [each["value"] for each in operations if each["key"] == "file"]
            before = self.hub.repos[match["repo"]].commits[_commit("main")]
            new = {file["path"]: b64decode(file["content"]) for file in files}
            self.hub.repos[match["repo"]] = Repo({"main": before | new})
            url = f"{self.hub.url}/datasets/{match['repo']}/commit/{_commit('main')}"
            self._send(200, {"commitUrl": url, "commitOid": _commit("main")})
        else:
            self._send(404, {"error": "not found"})

    def _body(self) -> bytes:
        """Read the content of a request, of a known length or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _api_match(self, path: str) -> re.Match[str] | None:
        """Find the repository: in `/api/models/gpt2/tree/main` it is gpt2, not gpt2/tree."""
        match = API.match(path)
        if match is None or match["repo"] in self.hub.repos:
            return match
        bare = re.match(r"/api/(?:models|datasets)/(?P<repo>[^/]+)", path)
        return bare if bare is not None and bare["repo"] in self.hub.repos else match

    def _api(self, repo_id: str, path: str, query: dict[str, list[str]]) -> None:
        repo = self._repo(repo_id)
        what, _, revision = path.partition("/")
        commit = repo.commit(unquote(revision or "main"))
        files = repo.commits[commit]
        if what in ("", "revision"):
            self._send(200, {
                "_id": commit[:24], "id": repo_id, "modelId": repo_id, "sha": commit, "private": False,
                "gated": "manual" if repo.gate else False, "disabled": False, "downloads": 0, "likes": 0,
                "tags": [], "siblings": [{"rfilename": name} for name in files],
            })  # fmt: skip
        elif what == "tree":
            recursive = query.get("recursive", ["false"])[0].lower() == "true"
            self._send(200, _tree(files, recursive))
        else:
            self._send(404, {"error": "not found"})

    def _file(self, repo_id: str, revision: str, name: str) -> None:
        repo = self._repo(repo_id)
        if repo.gate is not None and self._token() != repo.gate:
            status = 401 if self._token() is None else 403
            raise _Refused(status, "GatedRepo", f"Access to model {repo_id} is restricted.")
        commit = repo.commit(revision)
        headers = {"X-Repo-Commit": commit}
        content = repo.commits[commit].get(name)
        if content is None:
            raise _Refused(404, "EntryNotFound", "Entry not found", headers)
        faults = self.hub.faults.get(name) if self.command == "GET" else None
        fault = faults.pop(0) if faults else None
        if fault:
            raise _Refused(fault, "InternalServerError", "Something went wrong")
        etag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.hub.sends_parts else None
        part = content[int(asked[1]) : int(asked[2]) + 1] if asked else content
        self.hub.sent[name] += len(part) * (self.command == "GET")
        self._send(206 if asked else 200, part, headers | etag, cut=fault == CUT)

    def _repo(self, repo_id: str) -> Repo:
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            # without a token, the real hub does not say whether a repository is missing or private
            raise _Refused(404 if self._token() else 401, "RepoNotFound", "Repository not found")
        return repo

    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _send(self, status: int, content: Any, headers: Mapping[str, str] | None = None, cut: bool = False) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut

    def log_message(self, *_: object) -> None:
        """Print nothing, to keep the tests' output clean; `Hub.requests` has the requests."""


def _tree(files: Mapping[str, bytes], recursive: bool) -> list[dict[str, Any]]:
    """Return the listing of a repository in the form of the hub's `tree` endpoint."""
    entries: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        parts = name.split("/")
        for depth in range(1, len(parts)):
            path = "/".join(parts[:depth])
            entries[path] = {"type": "directory", "oid": _commit(path), "size": 0, "path": path}
        oid = hashlib.sha1(content).hexdigest()
        entries[name] = {"type": "file", "oid": oid, "size": len(content), "path": name}
    return [entry for path, entry in entries.items() if recursive or "/" not in path]
