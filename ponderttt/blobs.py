"""Contents from an object store by their SHA-1: many at once, in a fixed order, kept on disk.

A blob is kept as it came, compressed, under its id. It is checked against that id whenever it
is read, so that a file cut off by a crash is fetched again and needs no flush to disk.
"""

import email.utils
import hashlib
import random
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import botocore.session
import urllib3
from botocore import UNSIGNED
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from ponderttt import files
from ponderttt.errors import UserError
from ponderttt.params import Stack

PREFIX = "content/"
GZIP = 31  # zlib's window bits of a gzip stream
AHEAD = 4  # blobs in the works for each connection, so that a slow one holds up few

# Problems that may pass; every other one is final.
SERVER, CONNECTION = "server error", "connection failed"
TRANSIENT = (SERVER, CONNECTION)
REASONS = {301: "in another region", 307: "in another region", 403: "access denied", 404: "missing"}
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0

DOWN = """corpus.stack: more than {limit} requests to the bucket failed in a row ({problem}).
Check the network and bucket, region and endpoint in corpus.stack, then run `dvc repro` again: it \
goes on where it was."""


@dataclass(frozen=True)
class Blob:
    """A content, or the reason why there is none."""

    content: bytes
    problem: str = ""


class Store:
    """A bucket, and the folder that keeps what was fetched from it."""

    def __init__(self, settings: Stack, folder: Path, max_bytes: int) -> None:
        self.settings, self.folder, self.max_bytes = settings, folder, max_bytes
        self.base = f"{_endpoint(settings)}/{settings.bucket}/{PREFIX}"
        self.credentials = _credentials() if settings.signed else None
        self.pool = urllib3.PoolManager(
            maxsize=settings.connections, retries=False, timeout=settings.timeout
        )
        self.part = folder / ".part"
        self.closed = threading.Event()
        self.lock, self.failed = threading.Lock(), 0  # requests that failed one after the other

    def blobs(self, ids: Sequence[str]) -> Generator[Blob, None, None]:
        """Each blob in the order of `ids`, whichever comes first."""
        # Only what a killed run left lies there: the caller holds the folder's lock.
        shutil.rmtree(self.part, ignore_errors=True)
        self.part.mkdir(parents=True)
        self.closed.clear()
        window: deque[Future[Blob]] = deque()
        workers = ThreadPoolExecutor(self.settings.connections)
        try:
            for blob_id in ids:
                window.append(workers.submit(self.blob, blob_id))
                if len(window) >= AHEAD * self.settings.connections:
                    yield window.popleft().result()
            while window:
                yield window.popleft().result()
        finally:
            self.closed.set()  # whoever waits for another attempt stops waiting
            workers.shutdown(cancel_futures=True)
            shutil.rmtree(self.part, ignore_errors=True)

    def blob(self, blob_id: str) -> Blob:
        """One blob, from the folder if it is there and whole."""
        path = self.folder / blob_id[:2] / blob_id
        if path.is_file():
            kept = unpack(path.read_bytes(), blob_id, self.max_bytes)
            if not kept.problem:
                return kept
        body, problem = self._get(blob_id)
        blob = Blob(b"", problem) if problem else unpack(body, blob_id, self.max_bytes)
        if not blob.problem:
            self._keep(path, body)
        return blob

    def _keep(self, path: Path, body: bytes) -> None:
        temporary = self.part / f"{path.name}-{threading.get_ident()}"
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(body)
            temporary.replace(path)
        except OSError as error:
            raise files.disk_error(error, path) from error

    def _get(self, blob_id: str) -> tuple[bytes, str]:
        """The body as stored, or the problem left after the last attempt."""
        body, problem, pause = b"", "", 0.0
        for attempt in range(self.settings.attempts):
            if attempt and self.closed.wait(max(pause, _pause(attempt))):
                break
            body, problem, pause = self._try(blob_id)
            self._count(problem)
            if problem not in TRANSIENT:
                break
        return body, problem

    def _count(self, problem: str) -> None:
        """Stop when a whole window of requests failed: no attempt will help the next ones."""
        # One blob alone may use up all its attempts.
        limit = AHEAD * self.settings.connections + self.settings.attempts
        with self.lock:
            self.failed = self.failed + 1 if problem in TRANSIENT else 0
            down = self.failed > limit
        if down:
            self.closed.set()
            raise UserError(DOWN.format(limit=limit, problem=problem))

    def _try(self, blob_id: str) -> tuple[bytes, str, float]:
        """One request: body, problem, and the pause that the server asks for."""
        url = self.base + blob_id
        try:
            response = self.pool.request(
                "GET", url, headers=self._headers(url), redirect=False, preload_content=False
            )
            body = self._body(response)
        except urllib3.exceptions.HTTPError:
            return b"", CONNECTION, 0.0
        if response.status == 200:
            return body, "", 0.0
        if response.status == 429 or response.status >= 500:
            return b"", SERVER, _asked_pause(response.headers.get("Retry-After", ""))
        return b"", REASONS.get(response.status, "refused"), 0.0

    def _body(self, response: urllib3.BaseHTTPResponse) -> bytes:
        """The whole body; of one that is too long, only enough to know that it is."""
        body = b""
        for piece in response.stream(files.BLOCK, decode_content=False):
            body += piece
            if len(body) > self.max_bytes:
                response.close()
                break
        response.release_conn()
        return body

    def _headers(self, url: str) -> dict[str, str]:
        if self.credentials is None:
            return {}
        request = AWSRequest(method="GET", url=url)
        frozen = self.credentials.get_frozen_credentials()
        S3SigV4Auth(frozen, "s3", self.settings.region).add_auth(request)
        return dict(request.headers.items())


def unpack(body: bytes, blob_id: str, max_bytes: int) -> Blob:
    """The content of a gzip body, if it is whole and what its id says."""
    stream = zlib.decompressobj(GZIP)
    try:
        content = stream.decompress(body, max_bytes + 1)
    except zlib.error:
        return Blob(b"", "bad gzip")
    if len(content) > max_bytes:
        return Blob(b"", "too long")
    if not stream.eof:
        return Blob(b"", "bad gzip")
    if hashlib.sha1(content, usedforsecurity=False).hexdigest() != blob_id:
        return Blob(b"", "wrong hash")
    return Blob(content)


def _pause(attempt: int) -> float:
    """Twice as long every time, and never quite the same for two threads."""
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 (no secret)


def _asked_pause(value: str) -> float:
    """`Retry-After` in seconds or as a date; what cannot be read asks for nothing."""
    try:
        if value.strip().isdecimal():
            seconds = float(value)
        else:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(LONGEST_PAUSE, max(0.0, seconds))


def _endpoint(settings: Stack) -> str:
    """The server's address: the one given, or the region's own."""
    if settings.endpoint:
        return settings.endpoint.rstrip("/")
    try:
        client = botocore.session.get_session().create_client(
            "s3", region_name=settings.region, config=Config(signature_version=UNSIGNED)
        )
    except BotoCoreError as error:
        raise UserError(f"corpus.stack.region: {settings.region!r} is no region: {error}") from None
    return str(client.meta.endpoint_url).rstrip("/")


def _credentials() -> botocore.credentials.Credentials:
    found = botocore.session.get_session().get_credentials()
    if found is None:
        raise UserError(
            "corpus.stack.signed: this machine has no AWS credentials; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY or run `aws configure`, or set corpus.stack.signed to false"
        )
    return found
