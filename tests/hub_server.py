"""
A small hub on the loopback, with faults to order.

    with Hub({"main": {"fineweb_val_000000.bin": b"..."}}) as hub:
        hub.fault("GET", "fineweb_val_000000.bin", "cut", "429")  # the first two answers; the third is right
        hub.fault("HEAD", "fineweb_val_000000.bin", FOREVER("500"))
        ... HF_ENDPOINT=hub.url ...
        hub.asked("GET")  # the requests for bytes, in order

It answers HEAD and GET on /datasets/<repo>/resolve/<revision or commit>/<file>. As the hub does for large files, it
states commit, sha256 and size there and redirects to a store under another host name, which knows ranges; with
direct=True it serves the bytes itself, as the hub does for small files.
"""

import hashlib
import itertools
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

FOREVER = itertools.repeat


class Request(NamedTuple):
    method: str
    place: str  # "hub" or "store"
    revision: str
    name: str
    range: str | None
    token: str | None


class Hub:
    def __init__(self, versions, repo="kjj0/fineweb10B-gpt2", token=None, direct=False):
        """versions: {revision: {file name: bytes}}; with a token, the hub (not its store) wants to see it."""
        self.versions, self.repo, self.token, self.direct = versions, repo, token, direct
        self.commits = {version: hashlib.sha1(version.encode()).hexdigest() for version in versions}
        self.requests, self.faults, self.retry_after = [], {}, None
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub, self.server.daemon_threads, self.server.block_on_close = self, True, False
        port = self.server.server_address[1]
        self.url, self.store_url = f"http://127.0.0.1:{port}", f"http://localhost:{port}"

    def fault(self, method, name, *faults):
        """Answer the next requests for this file's metadata (HEAD) or bytes (GET) with these faults:
        404 or another status; cut: half a body, then the connection is gone; short: half a body, and a length that fits
        it; no ranges; cut without ranges; slow: the body comes after a second; other bytes: right length, wrong ones;
        silence; silence in body; trickle: a byte of header now and then; no commit."""
        self.faults[method, name] = itertools.chain(*([fault] if isinstance(fault, str) else fault for fault in faults))

    def heal(self):
        self.faults.clear()

    def asked(self, method, name=None):
        """Requests for metadata (HEAD) or bytes (GET: at the store, unless the hub is direct)."""
        place = "store" if method == "GET" and not self.direct else "hub"
        with self.lock:
            return [r for r in self.requests if (r.method, r.place) == (method, place) and name in (None, r.name)]

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
        path = re.fullmatch(rf"(/store|/datasets/{re.escape(hub.repo)}/resolve)/([^/]+)/([^/]+)", self.path)
        if not path:
            return self.refuse(404, "RepoNotFound")
        place, revision, name = "store" if path[1] == "/store" else "hub", path[2], path[3]
        token = self.headers.get("Authorization")
        serves_bytes = place == "store" or (hub.direct and self.command == "GET")
        with hub.lock:
            hub.requests.append(Request(self.command, place, revision, name, self.headers.get("Range"), token))
            faulty = serves_bytes or self.command == "HEAD"  # not on the redirect: one fault for one request for bytes
            fault = next(hub.faults.get((self.command, name), iter(())), None) if faulty else None
        version = next((version for version, commit in hub.commits.items() if revision in (version, commit)), None)
        if fault in ("silence", "trickle"):
            self.stay_silent(trickle=fault == "trickle")
        elif fault and fault.isdigit():
            self.refuse(int(fault))
        elif place == "hub" and hub.token and token != f"Bearer {hub.token}":
            self.refuse(401)
        elif version is None:
            self.refuse(404, "RevisionNotFound")
        elif name not in hub.versions[version]:
            self.refuse(404, "EntryNotFound")
        elif serves_bytes:
            self.send_bytes(hub.versions[version][name], fault)
        else:
            self.send_metadata(version, name, fault)

    def refuse(self, status, code=None):
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if self.server.hub.retry_after is not None:
            self.send_header("Retry-After", str(self.server.hub.retry_after))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_metadata(self, version, name, fault):
        hub, body = self.server.hub, self.server.hub.versions[version][name]
        self.send_response(200 if hub.direct else 302)
        if fault != "no commit":
            self.send_header("X-Repo-Commit", hub.commits[version])
        if hub.direct:
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Linked-Size", str(len(body)))
            self.send_header("Location", f"{hub.store_url}/store/{version}/{name}")
            self.send_header("Content-Length", "0")
        self.end_headers()

    def send_bytes(self, body, fault):
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and fault not in ("no ranges", "cut without ranges") else 0
        if start >= len(body):
            return self.refuse(416)
        if fault == "other bytes":
            body = body[:-2] + bytes(255 - byte for byte in body[-2:])
        rest = body[start:]
        stop = len(rest) if fault in (None, "no ranges", "slow", "other bytes") else len(rest) // 2
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(stop if fault == "short" else len(rest)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if fault == "slow":
            self.server.hub.closing.wait(1)
        self.wfile.write(rest[:stop])
        self.wfile.flush()
        if fault == "silence in body":
            self.stay_silent()
        self.close_connection = self.close_connection or fault in ("cut", "cut without ranges")

    def stay_silent(self, trickle=False):
        if trickle:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self.server.hub.closing.wait(0.5):
            if trickle:
                try:
                    self.wfile.write(b".")
                except OSError:
                    break
        self.close_connection = True
