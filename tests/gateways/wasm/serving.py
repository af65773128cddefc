"""Guests of `inferd wasm run` that wait for prompts: `guest.c`'s scenario `serve`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.daemon.command_line import inferd_process
from tests.gateways.wasm.guests import c_guest

__all__ = ("ServingGuest", "serving_guests")

READY = b"ready\n"


class ServingGuest:
    """A guest with a context. A prompt is a line; the answer is text, a NUL and the metadata."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self.process = process

    def wait_until_ready(self) -> None:
        """Wait until the guest has its context."""
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        assert first == READY, (first, self.process.communicate())

    def send_prompt(self, text: str) -> None:
        """Let the guest begin a turn."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())
        self.process.stdin.flush()

    def read_text(self, size: int) -> bytes:
        """Return the next *size* bytes of the answer."""
        assert self.process.stdout is not None
        return self.process.stdout.read(size)

    def read_answer(self) -> tuple[bytes, dict[str, Any]]:
        """Return the rest of the answer and its metadata, or raise what the guest has reported."""
        assert self.process.stdout is not None
        text, _, metadata = self.process.stdout.readline().partition(b"\0")
        while not metadata:  # the text has line ends
            more = self.process.stdout.readline()
            assert more, (text, self.process.communicate())
            before, _, metadata = more.partition(b"\0")
            text += before
        return text, json.loads(metadata)


@contextmanager
def serving_guests(
    socket: str, model: str, config: object, priorities: list[str]
) -> Iterator[list[ServingGuest]]:
    """Run a guest for each of *priorities*, all with a context."""
    with ExitStack() as stack:
        guests = []
        for priority in priorities:
            process = inferd_process(
                *("wasm", "run", "--priority", priority, str(c_guest()), "--"),
                *("serve", model, json.dumps(config)),
                socket=socket,
                stdin=subprocess.PIPE,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            guests.append(ServingGuest(process))
        for guest in guests:
            guest.wait_until_ready()
        yield guests
