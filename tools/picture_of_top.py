"""Generator of docs/top.svg: `inferd top` on a terminal while programs use two real models.

The command runs on a pseudo-terminal, and textual saves its screen after a while. It needs the
models of `make models`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import inferd
from inferd import Priority
from inferd.testing import running_daemon

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".cache" / "models"
PICTURE = ROOT / "docs" / "top.svg"
FILES = {"smollm2": "smollm2-135m-instruct.gguf", "gemma3": "gemma-3-270m.gguf"}
CHATS = ("smollm2",)
"""The models that have a chat template."""
CONFIG = "[defaults]\nslots = 2\nctx-size = 2048\n"
COLUMNS, LINES = 100, 30
AFTER_S = 12
"""By then the models are loaded and the queue is stable."""
ENDS_S_MAX = 60.0


@dataclass(frozen=True)
class Program:
    """A program that repeats the same turn."""

    name: str
    model: str
    priority: Priority
    prompt: str
    tokens: int
    times: int = 1000

    def run(self, socket: str, over: threading.Event) -> None:
        """Run turns until *over* is set."""
        options = {"n-predict": self.tokens, "seed": 1}
        with (
            suppress(inferd.InferdError),
            inferd.Client(socket) as client,
            client.session(
                self.model, session_id=self.name, priority=self.priority, options=options,
                raw=self.model not in CHATS,
            ) as session,
        ):  # fmt: skip
            for _ in range(self.times):
                for _ in session.stream(self.prompt):
                    if over.is_set():
                        return
                if self.times > 1:
                    session.reset()
            over.wait()


STORY = "Write a long story about a lighthouse and its keeper, with many details."
PROGRAMS = (
    Program("nightly-digest", "smollm2", "low", STORY, 900),
    Program("nightly-tags", "smollm2", "low", "Write a long list of animals.", 900),
    Program("editor", "smollm2", "normal", "Explain what a daemon is, at length.", 600),
    Program("mail-ada", "smollm2", "high", "Write a long letter to a friend.", 500),
    Program("help-desk", "gemma3", "normal", "The history of the printing press:", 700),
    Program("subtitles", "gemma3", "normal", "A long dialogue between two sailors:", 700),
    Program("archive", "gemma3", "low", "All the rivers of Europe:", 700),
    Program("shell", "smollm2", "normal", "Say hello.", 8, times=1),
)


def take_picture(socket: str, folder: Path) -> Path:
    """Run `inferd top` on a terminal until it has saved its picture; return the picture."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", LINES, COLUMNS, 0, 0))
    environ = {
        **{name: value for name, value in os.environ.items() if name != "NO_COLOR"},
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "INFERD_SOCKET": socket,
        "TEXTUAL_SCREENSHOT": str(AFTER_S),
        "TEXTUAL_SCREENSHOT_LOCATION": str(folder),
        "TEXTUAL_SCREENSHOT_FILENAME": PICTURE.name,
    }
    command = [sys.executable, "-m", "inferd", "top"]
    with subprocess.Popen(
        command,
        env=environ,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as process:
        os.close(terminal)
        with suppress(OSError):  # the other end is closed
            while os.read(controller, 65536):
                pass
        status = process.wait(ENDS_S_MAX)
    os.close(controller)
    if status:
        raise SystemExit(f"inferd top ended with {status}")
    return folder / PICTURE.name


def main() -> None:
    """Make the picture."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, file in FILES.items():
            (Path(folder) / f"{name}.gguf").symlink_to(MODELS / file)
        over = threading.Event()
        with (
            running_daemon(CONFIG, models_dir=folder) as daemon,
            ThreadPoolExecutor(len(PROGRAMS)) as pool,
        ):
            for program in PROGRAMS:
                pool.submit(program.run, daemon.socket, over)
            try:
                picture = take_picture(daemon.socket, Path(folder))
            finally:
                over.set()
        PICTURE.write_text(picture.read_text())
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
