"""Scrapes of a daemon as by Prometheus, over any listen address."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from inferd.testing import RunningDaemon

__all__ = ("ScrapedMetrics", "ask", "scrape_metrics", "scrape", "until")

SECONDS_MAX = 60.0
POLL_S = 0.01


def connect(where: str) -> socket.socket:
    """Connect to a path, or to HOST:PORT."""
    if where.startswith("/"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(SECONDS_MAX)
        try:
            sock.connect(where)
        except BaseException:
            sock.close()
            raise
        return sock
    host, _, port = where.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), SECONDS_MAX)


def ask(where: str, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send a request as it is; return status, headers and body of the answer."""
    with connect(where) as sock:
        sock.sendall(request)
        data = b""
        while part := sock.recv(1 << 16):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split(" ")[1]), headers, body


def where_of(daemon: RunningDaemon) -> str:
    """Return the metrics address of a daemon of the tests."""
    return str(daemon.directory / "metrics.sock")


def scrape(where: str) -> str:
    """Return the text of a scrape."""
    status, headers, body = ask(where, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (status, int(headers["Content-Length"])) == (200, len(body))
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return body.decode()


class ScrapedMetrics:
    """One scrape, as samples."""

    def __init__(self, text: str):
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, sample: str, **labels: str) -> float:
        """Return the value of a sample, of its name behind `inferd_`; 0.0 if there is none."""
        return self._values.get((f"inferd_{sample}", frozenset(labels.items())), 0.0)


def scrape_metrics(daemon: RunningDaemon) -> ScrapedMetrics:
    """Scrape a daemon of the tests."""
    return ScrapedMetrics(scrape(where_of(daemon)))


def until(daemon: RunningDaemon, holds: Callable[[ScrapedMetrics], bool]) -> ScrapedMetrics:
    """Return the first scrape for which *holds* returns True."""
    rest, end = threading.Event(), time.monotonic() + SECONDS_MAX
    while not holds(scraped := scrape_metrics(daemon)):
        assert time.monotonic() < end, f"it never held:\n{scraped.text}"
        rest.wait(POLL_S)
    return scraped
