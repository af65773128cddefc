"""The browser for the tests of the gateway's web page, from PATH or else from Debian's package.

Chromium needs many of the system's libraries, so it is installed, not only unpacked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

__all__ = ("MISSING", "browser")

PACKAGE = "chromium-headless-shell"
NAMES = (PACKAGE, "chromium", "chromium-browser", "google-chrome")
MISSING = (
    f"a browser is missing: run `make browser` as root, or install Debian's {PACKAGE}, or put"
    " Chromium into PATH"
)
UPDATE_S_MAX, INSTALL_S_MAX = 120, 600


def browser() -> str | None:
    """Return the path of a browser, or None if none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def install() -> None:
    """Install the package.

    :raises OSError: apt is not installed, or the user is not root.
    :raises subprocess.SubprocessError: apt fails or takes too long.
    """
    if shutil.which("apt-get") is None:
        raise OSError("this system has no apt-get")
    if os.geteuid() != 0:
        raise PermissionError("only root can install packages")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command, seconds in (
        (["update"], UPDATE_S_MAX),
        (["install", "--yes", "--no-install-recommends", PACKAGE], INSTALL_S_MAX),
    ):
        subprocess.run(["apt-get", "-qq", *command], check=True, timeout=seconds, env=environment)


def main() -> None:
    """Install a missing browser. Only print a failure, because tests that need it fail then."""
    if browser():
        return
    try:
        install()
    except (OSError, subprocess.SubprocessError) as exc:
        sys.stderr.write(f"{exc}\n{MISSING}\n")


if __name__ == "__main__":
    main()
