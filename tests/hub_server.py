"""
A small hub on the loopback, with faults to order.

    with Hub({"main": {"fineweb_val_000000.bin": b"..."}}) as hub:
        hub.fault("GET", "fineweb_val_000000.bin", "cut", "429")  # the first two answers; the third is right
        hub.fault("INFO", None, FOREVER("500"))
        ... HF_ENDPOINT=hub.url ...
        hub.asked("GET")  # the requests for bytes, in order

As the hub does, it lists a repository's files with their sizes and sha256 (INFO), states commit, ETag and size of each
file (HEAD), and redirects to a store under another host name, which knows ranges (GET).
"""

import hashlib
import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

FOREVER = itertools.repeat


class Request(NamedTuple):
    kind: str  # INFO, HEAD or GET
    name: str | None  # of the file
    revision: str
    range: str | None
    token: str | None


class Hub:
    def __init__(self, versions, repo="kjj0/fineweb10B-gpt2", token=None):
        """versions: {revision: {file name: bytes}}; with a token, the hub (not its store) wants to see it."""
        self.versions, self.repo, self.token = versions, repo, token
        self.commits = {version: hashlib.sha1(version.encode()).hexdigest() for version in versions}
        self.requests, self.faults = [], {}
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub, self.server.daemon_threads, self.server.block_on_close = self, True, False
        port = self.server.server_address[1]
        self.url, self.store_url = f"http://127.0.0.1:{port}", f"http://localhost:{port}"

    def fault(self, kind, name, *faults):
        """Answer the next requests of this kind, for this file (None for INFO), with these faults:
        404 or another status; silence; trickle: a byte of header now and then; no hub: an answer of another kind;
        another etag; and in bodies cut: half, then the connection is gone; short: half, and a length that fits it;
        slow: after a second; other bytes: right length, wrong ones; pause: half, then silence; drip: half, then a byte
        now and then; endless: more bytes than stated, without end."""
        self.faults[kind, name] = itertools.chain(*([fault] if isinstance(fault, str) else fault for fault in faults))

    def heal(self):
        self.faults.clear()

    def asked(self, kind, name=None):
        with self.lock:
            return [request for request in self.requests if request.kind == kind and name in (None, request.name)]

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        hub = self.server.hub
        repo = re.escape(hub.repo)
        info = re.fullmatch(rf"/api/datasets/{repo}(?:/revision/([^/?]+))?\?blobs=\w+", self.path)
        file = re.fullmatch(rf"(?:/store|/datasets/{repo}/resolve)/([^/]+)/([^/]+)", self.path)
        if not info and not file:
            return self.refuse(404, "RepoNotFound")
        revision, name = (info[1] or "main", None) if info else file.groups()
        kind = "INFO" if info else self.command
        token = self.headers.get("Authorization")
        with hub.lock:
            hub.requests.append(Request(kind, name, revision, self.headers.get("Range"), token))
            fault = next(hub.faults.get((kind, name), iter(())), None)
        version = next((version for version, commit in hub.commits.items() if revision in (version, commit)), None)
        if fault in ("silence", "trickle"):
            self.stay_silent(b"HTTP/1.1 200 OK\r\nX-Slow: " if fault == "trickle" else b"")
        elif fault and fault.isdigit():
            self.refuse(int(fault))
        elif kind != "GET" and hub.token and token != f"Bearer {hub.token}":
            self.refuse(401)
        elif version is None:
            self.refuse(404, "RevisionNotFound")
        elif kind == "INFO":
            self.send_info(version, fault)
        elif name not in hub.versions[version]:
            self.refuse(404, "EntryNotFound")
        elif kind == "HEAD":
            self.send_metadata(version, name, fault)
        else:
            self.send_bytes(hub.versions[version][name], fault)

    def start(self, status, **headers):
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header.replace("_", "-"), value)
        self.end_headers()

    def refuse(self, status, code=""):
        self.start(status, X_Error_Code=code, Content_Length="0")

    def send_info(self, version, fault):
        hub = self.server.hub
        siblings = [
            dict(rfilename=name, size=len(body), lfs=dict(size=len(body), sha256=sha256(body), pointerSize=134))
            for name, body in hub.versions[version].items()
        ]
        info = dict(id=hub.repo, sha=hub.commits[version], siblings=siblings)
        body = b"<html>" if fault == "no hub" else json.dumps(info).encode()
        self.start(200, Content_Length=str(len(body)))
        self.wfile.write(body)

    def send_metadata(self, version, name, fault):
        hub, body = self.server.hub, self.server.hub.versions[version][name]
        etag = sha256(body if fault != "another etag" else b"")
        stated = dict(X_Repo_Commit=hub.commits[version], X_Linked_Etag=f'"{etag}"', X_Linked_Size=str(len(body)))
        self.start(302, Location=f"{hub.store_url}/store/{version}/{name}", Content_Length="0", **stated)

    def send_bytes(self, body, fault):
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        if fault == "other bytes":
            body = body[:-2] + bytes(255 - byte for byte in body[-2:])
        rest, whole = body[start:], fault in (None, "slow", "other bytes", "endless")
        sent = rest if whole else rest[: len(rest) // 2]
        length = 10**15 if fault == "endless" else len(sent) if fault == "short" else len(rest)
        place = dict(Content_Range=f"bytes {start}-{len(body) - 1}/{len(body)}") if start else {}
        self.start(206 if start else 200, Content_Length=str(length), **place)
        if fault == "slow":
            self.server.hub.closing.wait(1)
        self.wfile.write(sent)
        self.wfile.flush()
        if fault in ("pause", "drip"):
            self.stay_silent(b"." if fault == "drip" else b"")
        try:
            while fault == "endless" and not self.server.hub.closing.is_set():
                self.wfile.write(bytes(2**16))
        except OSError:  # the client has had enough
            self.close_connection = True
        self.close_connection = self.close_connection or fault == "cut"

    def stay_silent(self, drip=b""):
        """Say nothing more, or this now and then, until the client goes."""
        try:
            while not self.server.hub.closing.wait(0.2):
                self.wfile.write(drip)
                drip = drip[-1:]
        except OSError:
            pass
        self.close_connection = True


def sha256(body):
    return hashlib.sha256(body).hexdigest()
