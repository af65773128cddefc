"""A child process that reports to its parent in lines of JSON, and is replaced when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Generic, TypeVar

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from ...backends.errors import InferdError
from .published import REPORT_BYTES_MAX

RETRY_S_MIN = 1.0
T = TypeVar("T")


class ChildFailed(Exception):
    """A child process does not report."""


class ReportingChild(Generic[T]):
    """The Python *module* as a child with one argument; each line of its output is a *report*. The
    child reads *request*, and has the variables *environment* beside those of this process.

    A child is replaced when it has ended, or has not reported within *first_s_max* after its start
    or *silent_s_max* after a report.
    """

    def __init__(
        self,
        module: str,
        argument: str,
        report: type[T],
        request: bytes = b"",
        *,
        first_s_max: float,
        silent_s_max: float,
        retry_s_max: float,
        environment: Mapping[str, str] | None = None,
    ):
        self._environment = environment or {}
        self._command = [sys.executable, "-P", "-m", module, argument]
        self._request = request
        self._decoder = msgspec.json.Decoder(report)
        self._first_s_max, self._silent_s_max = first_s_max, silent_s_max
        self._retry_s_max = retry_s_max

    async def follow(
        self, accept: Callable[[T], Awaitable[bool]], fail: Callable[[str], object]
    ) -> None:
        """Pass each report to *accept* until cancelled; if *accept* returns false, replace the
        child. Pass the cause of a child's failure to *fail*.
        """
        retry_s = RETRY_S_MIN
        while True:
            try:
                async with aclosing(self._reports()) as reports:
                    async for report in reports:
                        if not await accept(report):
                            break
                        retry_s = RETRY_S_MIN
            except InferdError as exc:
                fail(exc.message)
            except anyio.BrokenResourceError:
                fail("its child process has ended")
            except (ChildFailed, OSError, msgspec.DecodeError) as exc:
                fail(str(exc))
            await anyio.sleep(retry_s)
            retry_s = min(2 * retry_s, self._retry_s_max)

    async def _reports(self) -> AsyncGenerator[T]:
        """Start a child, and yield its reports until it ends.

        :raises ChildFailed: it has ended or is silent.
        """
        process = await anyio.open_process(
            self._command,
            env=os.environ | self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            if self._request:
                await process.stdin.send(self._request)
            lines, wait_s = BufferedByteReceiveStream(process.stdout), self._first_s_max
            while True:
                yield self._decoder.decode(await _received_line(lines, wait_s))
                wait_s = self._silent_s_max
        finally:
            with anyio.CancelScope(shield=True):
                with suppress(ProcessLookupError):
                    process.kill()
                await process.aclose()


async def _received_line(lines: BufferedByteReceiveStream, wait_s: float) -> bytes:
    try:
        with anyio.fail_after(wait_s):
            return await lines.receive_until(b"\n", REPORT_BYTES_MAX)
    except TimeoutError:
        raise ChildFailed(f"no report within {wait_s:g} s") from None
    except (anyio.IncompleteRead, anyio.EndOfStream):
        raise ChildFailed("its child process has ended") from None
    except anyio.DelimiterNotFound:
        raise ChildFailed("its report is too long") from None
