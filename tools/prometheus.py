"""A Prometheus that scrapes one target, for the tests and the dashboard's picture."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.get_prometheus import MISSING, tool

__all__ = ("prometheus", "query")

ANSWER_S_MAX = 60.0


@contextmanager
def prometheus(
    target: str, folder: Path, *, scrape_s: int = 1, instance: str = "", rules: Sequence[Path] = ()
) -> Iterator[str]:
    """Run a Prometheus that keeps its files in *folder*; yield its address.

    It scrapes *target* each *scrape_s* seconds, as *instance* if that is given.
    """
    address = f"127.0.0.1:{_free_port()}"
    scraped = {"targets": [target], "labels": {"instance": instance} if instance else {}}
    config = {
        "global": {"scrape_interval": f"{scrape_s}s", "evaluation_interval": f"{scrape_s}s"},
        "rule_files": [str(rule) for rule in rules],
        "scrape_configs": [{"job_name": "inferd", "static_configs": [scraped]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is valid YAML
    path = tool("prometheus")
    assert path is not None, MISSING
    options = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'db'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [path, *options, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def query(address: str, call: str, **parameters: str | float) -> list[dict[str, Any]]:
    """Return the result of `query` or `query_range`.

    :raises OSError: Prometheus does not respond, or refuses the query.
    """
    url = f"http://{address}/api/v1/{call}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=ANSWER_S_MAX) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
