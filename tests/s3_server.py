"""A real S3 server (moto) on loopback that fails on purpose; run as `s3_server.py PLAN.json`.

The plan names keys under `error` (503 at first, as often as it says), `cut` (half a body at
first) and `slow`. `/__seen__` answers what was asked for since the last `/__reset__`. From
`/__break__` to the next reset, keys that the plan calls `weak` are answered with 503 alone.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Faulty:
    """An S3 application behind a few faults."""

    def __init__(self, app: App, plan: dict[str, Any]) -> None:
        self.app, self.plan, self.lock = app, plan, threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.asked: Counter[str] = Counter()
        self.now = self.most = self.signed = 0
        self.broken = False

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        key = environ["PATH_INFO"].rpartition("/")[2]
        if key in ("__seen__", "__reset__", "__break__"):
            return self.answer(key, start)
        if environ["REQUEST_METHOD"] != "GET":
            return self.app(environ, start)
        with self.lock:
            self.asked[key] += 1
            self.now += 1
            self.most = max(self.most, self.now)
            self.signed += "HTTP_AUTHORIZATION" in environ
            count = self.asked[key]
        try:
            return self.serve(key, count, environ, start)
        finally:
            with self.lock:
                self.now -= 1

    def serve(
        self, key: str, count: int, environ: dict[str, Any], start: Callable[..., Any]
    ) -> Iterable[bytes]:
        if key in self.plan["slow"]:
            time.sleep(0.3)
        dead = self.broken and key in self.plan["weak"]
        if dead or count <= self.plan["error"].get(key, 0):
            start("503 Slow Down", [("Content-Length", "0"), ("Retry-After", "0")])
            return []
        body = list(self.app(environ, start))
        if key in self.plan["cut"] and count == 1:
            whole = b"".join(body)
            return [whole[: len(whole) // 2]]
        return body

    def answer(self, key: str, start: Callable[..., Any]) -> Iterable[bytes]:
        seen = {"asked": self.asked, "most": self.most, "signed": self.signed}
        body = json.dumps(seen).encode()
        if key == "__reset__":
            self.reset()
        self.broken = self.broken or key == "__break__"
        start("200 OK", [("Content-Length", str(len(body)))])
        return [body]


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as S3 does

    def log(self, type: str, message: str, *args: Any) -> None:
        """No line per request."""


if __name__ == "__main__":
    app = Faulty(
        DomainDispatcherApplication(create_backend_app), json.loads(Path(sys.argv[1]).read_text())
    )
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    print(server.port, flush=True)
    server.serve_forever()
