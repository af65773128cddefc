"""The C client's frames: the vectors of the protocol, damaged bytes, bounds."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from .build import ADDRESS, THREAD, build, scenarios

PROGRAM = "wire_host"
ROOT = Path(__file__).resolve().parents[3]
VECTORS: dict[str, Any] = json.loads((ROOT / "docs" / "protocol-vectors.json").read_text())
FRAMES = [frame for exchange in VECTORS["exchanges"] for frame in exchange["frames"]]
HELLO = bytes.fromhex(FRAMES[0]["hex"])
READERS = ("prints_each_frame_as_json", "damaged_frames_end_in_events")
PLAYER = "calls_a_daemon_and_prints_the_outcome"


def run(sanitizers: str, scenario: str, text: str = "", **environment: str) -> str:
    done = subprocess.run(
        [str(build(sanitizers) / PROGRAM), scenario],
        input=text,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_c_reader_gives_each_frame_its_written_meaning() -> None:
    lines = run(ADDRESS, READERS[0], "".join(f"{frame['hex']}\n" for frame in FRAMES)).splitlines()
    assert [json.loads(line) for line in lines] == [frame["means"] for frame in FRAMES]


@pytest.mark.parametrize("scenario", [s for s in scenarios(PROGRAM) if s not in (*READERS, PLAYER)])
def test_the_insides_of_the_c_client(scenario: str) -> None:
    run(ADDRESS, scenario)


def test_calls_that_time_out_in_several_threads_do_not_race() -> None:
    run(THREAD, "threads_time_out_side_by_side")


def test_damaged_frames_end_in_events_and_never_in_a_wrong_access() -> None:
    # One of each length, as events of request 1, which is a stream, and as replies to request 2.
    answers = [f["hex"] for f in FRAMES if f["from"] == "daemon" and f["means"][0] in (2, 3, 4)]
    chosen = {len(frame): frame for frame in answers if len(frame) < 800}.values()
    frames = [with_id(1 if bytes.fromhex(f)[5] == 4 else 2, f) for f in list(chosen)[:16]]
    assert len(frames) == 16
    run(ADDRESS, READERS[1], "\n".join([*frames, ""]))


def with_id(request: int, frame: str) -> str:
    """Return a frame with another id, where its own takes one byte."""
    data = bytearray.fromhex(frame)
    assert data[6] < 0x80
    data[6] = request
    return data.hex()


class Daemon:
    """A daemon that sends bytes: at once, or when it has received a hello and a request."""

    def __init__(self, path: Path, first: bytes, then: bytes):
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._frames = (first, then)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        first, then = self._frames
        with connection:
            connection.settimeout(60)
            connection.sendall(first)
            if then:
                for _ in range(2):
                    (size,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
                    connection.recv(size, socket.MSG_WAITALL)
                connection.sendall(then)
            while connection.recv(4096):
                pass

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def outcome(tmp_path: Path, first: bytes, then: bytes = b"", timeout_ms: int = 20_000) -> str:
    """Return the error with which the C client's call ends, or `reply`."""
    daemon = Daemon(tmp_path / "socket", first, then)
    try:
        environment = {"INFERD_SOCKET": str(tmp_path / "socket"), "TIMEOUT_MS": str(timeout_ms)}
        return run(ADDRESS, PLAYER, **environment).strip()
    finally:
        daemon.close()


@pytest.mark.parametrize("case", VECTORS["malformed_daemon"], ids=lambda case: case["name"])
def test_the_c_client_handles_a_malformed_daemon_as_in_the_vector(
    case: dict[str, Any], tmp_path: Path
) -> None:
    frames = b"".join(map(bytes.fromhex, case["frames"]))
    got = outcome(tmp_path, HELLO, frames) if case["hello"] else outcome(tmp_path, frames)
    assert got == case["outcome"].get("error", "reply")


@pytest.mark.parametrize(
    ("first", "then", "error"),
    [
        (b"", b"", "Timeout"),
        (HELLO, b"\x00", "Timeout"),  # it sends a part of a frame
        (b"\xff\xff\xff\xff", b"", "TooLarge"),
        (struct.pack("<I", (1 << 16) + 1), b"", "TooLarge"),  # the bound of a hello
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", "TooLarge"),
        (HELLO, struct.pack("<I", 5) + b"\x93\x02\x01\x80", "Timeout"),
        (HELLO, struct.pack("<I", 3) + b"\x93\x02\x01", "ProtocolError"),
        (HELLO, struct.pack("<I", 4) + b"\x93\x02\xa1x", "ProtocolError"),
        (HELLO, struct.pack("<I", 4) + b"\x93\xff\x01\x80", "ProtocolError"),
        (
            HELLO,
            struct.pack("<I", 71) + b"\x93\x02\x01\x81\xa1a" + b"\x91" * 64 + b"\xc0",
            "ProtocolError",
        ),
    ],
    ids=[
        "nothing",
        "a part",
        "a length",
        "a hello",
        "another protocol",
        "cut",
        "no content",
        "a text as id",
        "kind",
        "levels",
    ],
)
def test_bytes_that_are_not_the_protocol_give_an_error(
    tmp_path: Path, first: bytes, then: bytes, error: str
) -> None:
    timeout_ms = 200 if error == "Timeout" else 20_000
    assert outcome(tmp_path, first, then, timeout_ms) == error
