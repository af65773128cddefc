"""The encoder process: its messages, its limits, and contents that want to break it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from inferd.backends import media_process as m
from inferd.backends.fd_frames import FrameReader, send_frame
from inferd.backends.llama.media.program import NICE
from inferd.backends.media import MediaKind
from tests.backends.llama.media.driving import (
    PROGRAM,
    TIMEOUT_S,
    EncoderProcess,
    Ended,
    content_of,
)
from tests.media_samples import encoded_image, flac, mp3, picture, png, wav
from tests.repetitions import repetitions
from tests.tiny_gguf import EMBEDDING, write_tiny
from tests.tiny_projector import KINDS, write_pair, write_projector

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projectors")


@pytest.fixture(scope="module")
def grid(folder: Path) -> Iterator[EncoderProcess]:
    """Return a process for images of any size."""
    with EncoderProcess() as process:
        process.open(*write_pair("qwen2vl_merger", folder))
        yield process


def encode(
    process: EncoderProcess, data: bytes, kind: MediaKind = "image", tokens_max: int = 0
) -> list[bytes]:
    reply, descriptors = process.request(m.EncodeContent(kind, tokens_max), data)
    found = [content_of(descriptor) for descriptor in descriptors]
    assert isinstance(reply, m.ContentEncoded), reply
    assert len(reply.causal) == len(found)
    return found


def read(
    process: EncoderProcess, data: bytes, kind: MediaKind = "image", tokens_max: int = 0
) -> list[m.ItemPiece]:
    reply, _ = process.request(m.ReadContent(kind, tokens_max), data)
    assert isinstance(reply, m.ContentRead), reply
    return [piece for piece in reply.pieces if isinstance(piece, m.ItemPiece)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_content_is_read_and_encoded(kind: str, folder: Path) -> None:
    media: MediaKind = "audio" if kind == "ultravox" else "image"
    data = wav() if media == "audio" else png()
    with EncoderProcess() as process:
        opened = process.open(*write_pair(kind, folder))
        assert isinstance(opened, m.ProjectorOpened)
        facts = opened.facts
        assert (facts.kind, facts.width, facts.images) == (kind, EMBEDDING, media == "image")
        assert facts.weights_bytes > 100_000 and facts.buffer_bytes > 20_000
        items, memories = read(process, data, media), encode(process, data, media)
        place = 16 if facts.mrope else 0
        assert [len(memory) for memory in memories] == [
            item.size * (4 * EMBEDDING + place) for item in items
        ]
        process.send(m.UseThreads(2))
        again = encode(process, data, media)
        for one, two in zip(memories, again, strict=True):
            count = len(one) // (4 * EMBEDDING + place) * EMBEDDING
            rows = [np.frombuffer(memory, np.float32, count) for memory in (one, two)]
            assert np.abs(rows[0] - rows[1]).max() < 1e-4
    assert process.process.returncode == 0


def test_a_measured_buffer_is_not_measured_again(folder: Path) -> None:
    with EncoderProcess() as process:
        opened = process.open(*write_pair("mlp", folder), buffer_bytes=12_345_678)
        assert isinstance(opened, m.ProjectorOpened)
        assert opened.facts.buffer_bytes == 12_345_678
        assert len(encode(process, png())) == 1


def test_embeddings_are_sealed(grid: EncoderProcess) -> None:
    _, (descriptor,) = grid.request(m.EncodeContent("image"), png())
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    assert seals == 0xF
    for change in (lambda: os.pwrite(descriptor, b"x", 0), lambda: os.ftruncate(descriptor, 1)):
        with pytest.raises(OSError) as error:
            change()
        assert error.value.errno == errno.EPERM
    os.close(descriptor)


def test_the_process_keeps_no_descriptor(grid: EncoderProcess) -> None:
    def count() -> int:
        # It closes the descriptors of a reply behind it, and before the next request.
        grid.request(m.ReadContent("image"))
        return len(os.listdir(f"/proc/{grid.process.pid}/fd"))

    encode(grid, png())
    before = count()
    for _ in range(3):
        encode(grid, png())
        grid.request(m.ReadContent("image"), b"nothing")
        grid.request(m.ReadContent("image"), png(), png())
    assert count() == before


def test_the_kernel_limits_the_process(grid: EncoderProcess) -> None:
    pid = grid.process.pid
    memory, _ = resource.prlimit(pid, resource.RLIMIT_AS)
    assert 0 < memory < 64 << 30
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[1] <= 256
    status = Path(f"/proc/{pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.nice(0) + NICE)


def test_too_little_memory_ends_one_content_at_most(folder: Path) -> None:
    with EncoderProcess() as process:
        process.open(*write_pair("qwen2vl_merger", folder))
        pid = process.process.pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        present = pages * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (present + (9 << 20), present + (9 << 20)))
        try:
            reply, _ = process.request(m.ReadContent("image"), png(2500, 2500))
            assert isinstance(reply, m.Refused)
            assert reply.error["name"] == "MissingMemory"
            assert read(process, png())
        except Ended as ended:
            assert ended.status in (-signal.SIGABRT, -signal.SIGSEGV)


@pytest.mark.parametrize("name", ["READ_CPU_S_MAX", "ENCODE_CPU_S_MAX"])
def test_too_much_cpu_time_ends_the_process(name: str, folder: Path) -> None:
    request = m.ReadContent("image") if name.startswith("READ") else m.EncodeContent("image")
    with EncoderProcess(f"program.{name} = 0.02") as process:
        process.open(*write_pair("qwen2vl_merger", folder))
        with pytest.raises(Ended) as ended:
            process.request(request, png(1200, 1200))
        assert ended.value.status == -signal.SIGPROF


PARENT = f"""
import subprocess, sys
command = [sys.executable, "-P", "-m", "{PROGRAM}"]
subprocess.run(command, stdin=int(sys.argv[1]))
"""


def test_the_process_dies_with_its_parent_though_its_socket_is_open() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            parent = subprocess.Popen(
                [sys.executable, "-c", PARENT, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        ours.settimeout(TIMEOUT_S)
        send_frame(ours, msgspec.msgpack.encode(m.ReadContent("image")))
        reply = msgspec.msgpack.decode(FrameReader(ours).receive()[0], type=m.Reply)
        assert isinstance(reply, m.Refused), "no projector is open"
        parent.kill()
        parent.wait()
        assert ours.recv(1) == b""


@pytest.mark.parametrize(
    ("request_of", "contents", "name"),
    [
        (m.ReadContent("image"), (), "InvalidArgument"),
        (m.ReadContent("image"), (b"1", b"2"), "InvalidArgument"),
        (m.ReadContent("audio"), (wav(),), "UnsupportedOperation"),
        (m.EncodeContent("image"), (b"%PDF-1.7",), "InvalidArgument"),
    ],
)
def test_refusals_are_typed(
    request_of: m.Request, contents: tuple[bytes, ...], name: str, grid: EncoderProcess
) -> None:
    reply, descriptors = grid.request(request_of, *contents)
    assert isinstance(reply, m.Refused) and not descriptors
    assert reply.error["name"] == name and reply.error["hint"]


def test_a_projector_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with EncoderProcess() as process:
        reply = process.open(write_tiny("llama", tmp_path), write_projector("mlp", tmp_path, 96))
        assert isinstance(reply, m.Refused)
        assert reply.error["name"] == "LoadFailed" and "96" in reply.error["message"]


def test_a_hostile_projector_ends_only_its_process(tmp_path: Path) -> None:
    model, projector = write_pair("idefics3", tmp_path)
    whole, chance = projector.read_bytes(), random.Random(5)
    begin = whole.index(b"clip.projector_type")
    for number in range(repetitions(4)):
        data = bytearray(whole)
        for _ in range(3):
            data[chance.randrange(begin, begin + 1500)] = chance.randrange(256)
        hostile = tmp_path / f"mmproj-{number}.gguf"
        hostile.write_bytes(data)
        with EncoderProcess() as process:
            try:
                reply = process.open(model, hostile)
                if isinstance(reply, m.ProjectorOpened):
                    process.request(m.ReadContent("image"), png())
            except Ended as ended:
                assert ended.status < 0


def mutated(data: bytes, number: int) -> bytes:
    """Return *data* with damages, other ones for each *number*."""
    chance, found = random.Random(number), bytearray(data)
    for _ in range(1 + number % 7):
        match chance.randrange(4):
            case 0:
                del found[chance.randrange(1, len(found)) :]
            case 1:
                at = chance.randrange(len(found))
                found[at : at + 4] = chance.randbytes(4)
            case 2:
                at = chance.randrange(len(found))
                found[at:at] = found[:64]
            case _:
                at = chance.randrange(min(64, len(found)))
                found[at] ^= 1 << chance.randrange(8)
        if not found:
            break
    return bytes(found)


def png_of(width: int, height: int) -> bytes:
    data = bytearray(png())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


def hostile_images() -> list[bytes]:
    return [
        *(mutated(png(), number) for number in range(20)),
        *(mutated(encoded_image(picture(), "JPEG"), number) for number in range(20)),
        *(mutated(encoded_image(picture(), "WEBP"), number) for number in range(10)),
        *(mutated(encoded_image(picture(), "GIF"), number) for number in range(10)),
        *(mutated(encoded_image(picture(), "BMP"), number) for number in range(10)),
        *(png_of(*size) for size in ((1, 60_000), (60_000, 1), (30_000, 30_000), (0, 0), (1, 200))),
        encoded_image(picture(1, 1), "PNG"),
        encoded_image(picture(2, 300), "PNG"),
        encoded_image(picture(), "GIF", save_all=True, append_images=[picture(seed=2)] * 5),
        png() + b"PK\x03\x04<html><script>alert(1)</script>",
        b"GIF89a" + png(),
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9999999' height='9999999'/>",
        b"\x00\x00\x00\x18ftypheic" + bytes(100),
        b"PK\x03\x04" + bytes(100),
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        bytes(1000),
        wav(0.1),
    ]


def hostile_sounds() -> list[bytes]:
    return [
        *(mutated(wav(0.3), number) for number in range(repetitions(8))),
        *(mutated(mp3(30), number) for number in range(repetitions(8))),
        *(mutated(flac(0.5), number) for number in range(repetitions(8))),
        wav(0.0),
        wav(0.02),
        wav(0.02)[:46],
        b"RIFF\xff\xff\xff\xffWAVE",
        b"fLaC",
        b"ID3",
        b"",
        png(),
    ]


def survivors(
    process_of: tuple[Path, Path], kind: MediaKind, contents: list[bytes]
) -> tuple[int, int, int]:
    """Send each of *contents*; return how many were read, refused with a type, or ended the
    process, which is then started again.
    """
    results, refusals, ends = 0, 0, 0
    process = EncoderProcess()
    process.open(*process_of)
    try:
        for data in contents:
            try:
                reply, descriptors = process.request(m.EncodeContent(kind, 64), data)
            except Ended as ended:
                assert ended.status < 0
                ends += 1
                process = EncoderProcess()
                process.open(*process_of)
                continue
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(reply, m.Refused):
                refusals += 1
                assert reply.error["name"] in ("InvalidArgument", "TooLarge", "MissingMemory")
                assert reply.error["hint"] and reply.error["message"]
            else:
                results += 1
    finally:
        process.__exit__(None, None, None)
    return results, refusals, ends


@pytest.mark.parametrize("kind", ["mlp", "idefics3", "qwen2vl_merger"])
def test_hostile_images_end_in_an_error_or_a_result(kind: str, folder: Path) -> None:
    images = hostile_images()
    results, refusals, ends = survivors(write_pair(kind, folder), "image", images)
    assert results + refusals + ends == len(images) > 60
    assert results > 5 and refusals > 30
    assert not ends  # none is known that gets past the checks


def test_hostile_sounds_end_in_an_error_or_a_result(folder: Path) -> None:
    sounds = hostile_sounds()
    results, refusals, ends = survivors(write_pair("ultravox", folder), "audio", sounds)
    assert results + refusals + ends == len(sounds) > 30
    assert results > 5 and refusals > 10
    assert not ends
