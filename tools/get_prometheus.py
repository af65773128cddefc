"""The tools `prometheus` and `promtool` for the tests: those in PATH, or else Debian's package.

Owns `~/.cache/inferd/prometheus/`. apt fetches the package with separate lists and checks its
signature, so neither root nor a change to the system is needed. The package is unpacked, but not
installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ("MISSING", "tool")

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inferd" / "prometheus"
TOOLS = ("prometheus", "promtool")
MISSING = (
    "prometheus and promtool are missing: run `make prometheus`, or, on a system without apt, put"
    " both into PATH"
)
UPDATE_S_MAX, DOWNLOAD_S_MAX = 120, 300


def tool(name: str) -> str | None:
    """Return the path of a tool, or None if it is missing."""
    return shutil.which(name) or shutil.which(name, path=str(CACHE / "usr" / "bin"))


def fetch() -> None:
    """Fetch and unpack the package.

    :raises OSError: apt is not installed.
    :raises subprocess.SubprocessError: apt fails or takes too long.
    """
    state = CACHE / "apt"
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    options = [f"-oDir::State::Lists={state / 'lists'}", f"-oDir::Cache={state}"]
    options += ["-oAPT::Sandbox::User=", "-oAcquire::Languages=none", "-qq"]
    subprocess.run(["apt-get", *options, "update"], check=True, timeout=UPDATE_S_MAX)
    for old in CACHE.glob("*.deb"):
        old.unlink()
    download = ["apt-get", *options, "download", "prometheus"]
    subprocess.run(download, check=True, timeout=DOWNLOAD_S_MAX, cwd=CACHE)
    [package] = CACHE.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, CACHE], check=True, timeout=60)
    package.unlink()
    shutil.rmtree(state)


def main() -> None:
    """Fetch missing tools. Only print a failure, because tests that need them fail then."""
    if all(map(tool, TOOLS)):
        return
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        fetch()
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        sys.stderr.write(f"{exc}\n{MISSING}\n")


if __name__ == "__main__":
    main()
