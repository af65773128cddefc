"""A web server on 127.0.0.1 for the tests of pull, with scripted responses per path."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message

HOLD_S_MAX = 60.0


@dataclass
class Web:
    """The server's script and record: one response per request; the last one repeats."""

    url: str = ""
    answers: dict[str, list[Callable[[Handler], None]]] = field(default_factory=dict)
    requests: list[tuple[str, Message]] = field(default_factory=list)


class Handler(http.server.BaseHTTPRequestHandler):
    web: Web

    def do_GET(self) -> None:
        self.web.requests.append((self.path, self.headers))
        answers = self.web.answers.get(self.path, [status(404)])
        (answers.pop(0) if len(answers) > 1 else answers[0])(self)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def head(self, code: int, **headers: str | int) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()


def status(code: int, **headers: str | int) -> Callable[[Handler], None]:
    return lambda handler: handler.head(code, Content_Length=0, **headers)


def file(
    content: bytes, *, cut_at: int | None = None, etag: str = "", **headers: str | int
) -> Callable[[Handler], None]:
    """Respond with *content*, ranges included; the connection ends at byte *cut_at*."""
    etag = etag or f'"{hashlib.sha256(content).hexdigest()[:16]}"'

    def answer(handler: Handler) -> None:
        asked, start = handler.headers.get("Range"), 0
        if asked and handler.headers.get("If-Range") == etag:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start and start >= len(content):
            handler.head(416, Content_Range=f"bytes */{len(content)}", Content_Length=0)
            return
        more = {"ETag": etag} if etag != "none" else {}
        if start:
            more["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        handler.head(206 if start else 200, Content_Length=len(content) - start, **more, **headers)
        handler.wfile.write(content[start:cut_at])

    return answer


def until_closed(content: bytes) -> Callable[[Handler], None]:
    """Respond with *content* without its length, which ends with the connection."""

    def answer(handler: Handler) -> None:
        handler.head(200)
        handler.wfile.write(content)

    return answer


def page(text: str) -> Callable[[Handler], None]:
    """Respond with a web page."""

    def answer(handler: Handler) -> None:
        body = f"<!DOCTYPE html><html><body>{text}</body></html>".encode()
        handler.head(200, Content_Type="text/html", Content_Length=len(body))
        handler.wfile.write(body)

    return answer


def held(content: bytes, release: threading.Event) -> Callable[[Handler], None]:
    """Respond with *content*, of which the second half waits for *release*."""

    def answer(handler: Handler) -> None:
        handler.head(200, Content_Length=len(content))
        handler.wfile.write(content[: len(content) // 2])
        assert release.wait(HOLD_S_MAX), "nothing has released the response"
        handler.wfile.write(content[len(content) // 2 :])

    return answer


@contextmanager
def serving() -> Iterator[Web]:
    web = Web()
    handler = type("Scripted", (Handler,), {"web": web})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    web.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
