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
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from inferd.testing import running_daemon

MODELS = Path(__file__).resolve().parent.parent / ".cache" / "models"
PORT = 8080
SERVING = "serving HTTP on "
STOP_S_MAX = 15.0


@contextmanager
def running_gateway(socket: str, port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a gateway at *port*, or any free port if that is in use; yield its process and address.

    :raises SystemExit: the gateway did not start.
    """
    for each in (port, 0):
        command = [sys.executable, "-m", "inferd", "gateway", "--socket", socket]
        command += ["--listen", f"127.0.0.1:{each}"]
        with ExitStack() as stack:
            with signals_deferred():
                process = stack.enter_context(
                    subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
                )
                stack.callback(stop, process)
            address, printed = read_address(process)
            if address:
                with errors_printed(process):
                    yield process, address
                return
    raise SystemExit(printed or "the gateway did not start")


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer KeyboardInterrupt to the end of the block. In the middle of a start, it would leave a
    process that nothing stops.
    """
    numbers = list[int]()
    ends = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(end, lambda number, frame: numbers.append(number)) for end in ends]
    try:
        yield
    finally:
        for end, handler in zip(ends, before, strict=True):
            signal.signal(end, handler)
    if numbers:
        raise KeyboardInterrupt


def read_address(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return a gateway's address, empty if it did not start, and the lines it printed before."""
    assert process.stderr is not None
    printed = ""
    while line := process.stderr.readline():
        if line.startswith(SERVING):
            return line.removeprefix(SERVING).strip(), printed
        printed += line
    return "", printed


@contextmanager
def errors_printed(process: subprocess.Popen[str]) -> Iterator[None]:
    """Print a gateway's errors, because a full pipe would block it, and stop it at the end."""

    def print_lines() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)

    printer = threading.Thread(target=print_lines, daemon=True)
    printer.start()
    try:
        yield
    finally:
        stop(process)
        printer.join(STOP_S_MAX)


def stop(process: subprocess.Popen[str]) -> None:
    """Stop a gateway, by SIGKILL if it takes too long."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S_MAX)
    process.kill()
    process.wait()


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
        running_daemon(models_dir=None if given.echo else MODELS) as daemon,
        running_gateway(str(daemon.socket), given.port) as (process, address),
    ):
        print(f"chat at http://{address}/  (Ctrl-C ends it)", flush=True)
        show_page(f"http://{address}/")
        process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
