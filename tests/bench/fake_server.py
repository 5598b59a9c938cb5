"""Small servers in a thread that answer requests with given bytes: slowly, in parts, or not to the end."""

import asyncio
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Answer = Callable[[int], Iterable[bytes]]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"x","choices":[{"text":"a"}],"usage":null}\n\n'
DONE = b"data: [DONE]\n\n"


def usage(num_tokens: int) -> bytes:
    return b'data: {"id":"x","choices":[],"usage":{"completion_tokens":%d}}\n\n' % num_tokens


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def stream(num_tokens: int) -> bytes:
    """A whole good stream."""
    return HEAD + chunked(*[EVENT] * num_tokens, usage(num_tokens), DONE) + b"0\r\n\r\n"


def plain(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, int]]:
    """`answer(n)`: the parts of the n-th request's answer, each sent alone; an empty part closes the connection."""
    loop = asyncio.new_event_loop()
    numbers = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await read_request(reader):
                for part in answer(next(numbers)):
                    if not part:
                        return
                    writer.write(part)
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def read_request(reader: asyncio.StreamReader) -> bool:
    """Read one request to its end. False: there is none any more."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    await reader.readexactly(int(length[1]) if length else 0)
    return True


async def _end(server: asyncio.Server) -> None:
    server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
