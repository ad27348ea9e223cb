"""How many blobs of 5 KB a second the fetcher gets from a server on loopback.

The server answers from memory with as little work as can be, so that the fetcher is measured.
It takes its own share of the cores.
"""

import argparse
import asyncio
import dataclasses
import gzip
import hashlib
import multiprocessing
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from ponderttt import blobs, params

SIZE = 5000


def content(number: int) -> bytes:
    """Bytes that compress about as well as code does."""
    draw = random.Random(number)
    return bytes(draw.choices(range(32, 48), k=SIZE))


def serve(bodies: dict[str, bytes], ready: Connection) -> None:
    """Answer GET requests by the last part of their path."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readline():
            while await reader.readline() not in (b"\r\n", b""):
                pass
            body = bodies[request.split()[1].decode().rpartition("/")[2]]
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def measure(stack: params.Stack, ids: list[str], folder: Path) -> float:
    """Blobs per second into `folder`."""
    start = time.perf_counter()
    problems = [blob.problem for blob in blobs.Store(stack, folder, SIZE).blobs(ids)]
    seconds = time.perf_counter() - start
    assert not any(problems), problems
    return len(ids) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blobs", type=int, default=5000)
    contents = [content(number) for number in range(parser.parse_args().blobs)]
    bodies = {hashlib.sha1(c).hexdigest(): gzip.compress(c) for c in contents}
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(bodies, theirs), daemon=True)
    server.start()
    endpoint = f"http://127.0.0.1:{ours.recv()}"
    for connections in (4, 16, 64):
        stack = dataclasses.replace(
            params.load().corpus.stack, endpoint=endpoint, connections=connections
        )
        with tempfile.TemporaryDirectory() as folder:
            first = measure(stack, list(bodies), Path(folder))
            again = measure(stack, list(bodies), Path(folder))
        print(f"{connections:3} connections: {first:.0f} blobs/s, {again:.0f} from the disk")
    server.terminate()


if __name__ == "__main__":
    main()
