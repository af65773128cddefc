"""A chat in the browser: a daemon and a gateway of their own, until Ctrl-C.

The daemon serves the models that `make` has downloaded, or the one of `--model`. Chats are deleted
at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from inferd.testing import running_daemon

MODELS = Path(__file__).resolve().parent.parent / ".cache" / "models"
PORT = 8080
SERVING = "serving HTTP on "
STOP_S_MAX = 15.0


def start_gateway(socket: str, port: int) -> tuple[subprocess.Popen[str], str]:
    """Start a gateway, and return its process and address; at any free port if *port* is in use."""
    for each in (port, 0):
        command = [sys.executable, "-m", "inferd", "gateway", "--socket", socket]
        process = subprocess.Popen(
            [*command, "--listen", f"127.0.0.1:{each}"],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C ends it here, after its clients
        )
        assert process.stderr is not None
        line = process.stderr.readline()
        if line.startswith(SERVING):
            return process, line.removeprefix(SERVING).strip()
        process.wait()
    raise SystemExit(line or "the gateway did not start")


def show_page(url: str) -> None:
    """Open the page in the user's browser, if there is one."""
    opener = shutil.which("xdg-open")
    if opener is not None and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        subprocess.Popen([opener, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> int:
    """Serve the page until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="make chat", description="chat in the browser")
    parser.add_argument("--port", type=int, default=PORT, help="the port, if it is free")
    parser.add_argument("--echo", action="store_true", help="use the model echo, without weights")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        suppress(KeyboardInterrupt),
        running_daemon(models_dir=None if given.echo else MODELS) as d,
    ):
        process, address = start_gateway(str(d.socket), given.port)
        try:
            print(f"chat at http://{address}/  (Ctrl-C ends it)", flush=True)
            show_page(f"http://{address}/")
            process.wait()
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S_MAX)
            process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
