"""The channels of a graph: sockets on which clients send computations to its process, past the
daemon.

The daemon opens a channel for a client and tells whose it is; it learns from reports how much it is
used, and may close it at any time. A client sends what was not answered then to the daemon. Nothing
that comes from a channel is trusted: whatever a client does with its end, which may be any socket,
costs only its own computations.
"""

from __future__ import annotations

import fcntl
import math
import queue
import select
import socket
import termios
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from ..backends.errors import Cancelled, InferdError, InvalidArgument, ProtocolError, TooLarge
from ..backends.fd_frames import (
    SCM_MAX_FD,
    close_descriptor,
    read_with_descriptors,
    unread_descriptors,
)
from ..backends.tensors import NamedTensor, Tensor, spelled_type, type_number
from ..wire.channels import (
    ChannelCancel,
    ChannelCompute,
    ChannelResult,
    ChannelTensor,
    Request,
)
from ..wire.frames import REPLY_BYTES_MAX, UNREADABLE, FrameReader, Kind, pack_frame
from . import messages as m
from .arguments import priority_of, seconds_of
from .owner import Priority, Requester

REPORT_S = 0.1
"""The interval between reports on channels that are used."""
REQUESTS_MAX = 256
"""Computations of one user, in all its channels, that are under way or wait; more are not read."""
CHANNEL_BYTES_MAX = 4 << 20
"""Bytes of inputs and of unsent answers of one channel, from which on nothing more is read. An
incomplete frame comes on top, which could not end otherwise.
"""
BYTES_MAX = 256 << 20
"""As above, of all channels of the process, which have equal parts: a channel that occupies much
stops no other one.
"""
UNSENT_BYTES_MAX = 4 * REPLY_BYTES_MAX
"""Bytes of answers that a client has not read, above which its channel is closed: small inputs can
have large outputs. All channels together have at most `BYTES_MAX` of them; above that, those are
closed that have more than their part.
"""
FRAMES_MAX = 16
"""Frames of one user, from all its channels, that are handled before those of others and before the
engine computes.
"""
READ_BYTES = 1 << 16
READS_MAX = 32
"""Reads of one channel at a time, before the engine computes, if a large frame arrives."""
UNCLOSED_MAX = 4 * SCM_MAX_FD
"""Descriptors from clients that are not closed yet, above which no channel is opened."""
_NUMBER_BITS = 32
_DONTWAIT = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # the enumerations are slow
"""The client can change the mode of the socket itself."""
_TRUNCATED = int(socket.MSG_CTRUNC)

_read_request = msgspec.msgpack.Decoder(Request).decode
_read_compute = msgspec.msgpack.Decoder(ChannelCompute).decode
_read_cancel = msgspec.msgpack.Decoder(ChannelCancel).decode


def channel_of(request: int) -> int:
    """Return the channel of a request by its number in the engine; 0 if the daemon has sent it."""
    return request >> _NUMBER_BITS


class _Pending:
    """A computation without an answer: its number for the client and for the engine, the bytes of
    its inputs, and the types of inputs as the client has spelled them.
    """

    __slots__ = ("engine_number", "number", "priority", "size", "spelled")

    def __init__(self, number: int, engine_number: int, size: int, priority: Priority):
        self.number, self.engine_number, self.size = number, engine_number, size
        self.priority = priority
        self.spelled: dict[str, int | str] = {}

    def spell(self, outputs: Iterable[tuple[str, ChannelTensor]]) -> None:
        """Spell the type of an output as that of the input with its name and type."""
        for name, tensor in outputs:
            spelled = self.spelled.get(name)
            if spelled is not None and type_number(spelled) == type_number(tensor.type):
                tensor.type = spelled


class _Channel:
    """A client's socket, its computations, and its use since the last report."""

    __slots__ = (
        "closing", "computed", "fileno", "frames", "held_bytes", "is_reported",
        "last", "opened", "pending", "polled", "priority", "seconds", "sock", "unhandled", "unsent",
    )  # fmt: skip

    def __init__(self, opened: m.OpenChannel, sock: socket.socket):
        self.opened, self.sock, self.fileno = opened, sock, sock.fileno()
        self.frames = FrameReader()
        self.unhandled: deque[bytes] = deque()
        """The complete frames that were not handled, of the last read."""
        self.pending: dict[int, _Pending] = {}
        """By the client's numbers."""
        self.held_bytes = 0
        """The bytes of the inputs of these."""
        self.unsent = bytearray()
        self.last = 0
        """The number of the last computation, from 0 again after the largest one."""
        self.polled = -1
        """The events for which its socket is polled."""
        self.closing = self.is_reported = False
        self.computed, self.seconds = 0, 0.0
        self.priority = Priority.LOW

    def take_use(self, *, closed: bool = False) -> m.ChannelUse:
        """Return its use since the last call."""
        use = m.ChannelUse(
            self.opened.channel,
            self.computed,
            self.seconds,
            self.priority,
            len(self.pending),
            closed,
        )
        self.computed, self.seconds = 0, 0.0
        self.priority = max((one.priority for one in self.pending.values()), default=Priority.LOW)
        return use


class Channels:
    """The channels of a process, whose sockets *poll* watches beside the daemon's. *report* sends
    reports at once. *outputs* are the names of the graph's outputs.
    """

    def __init__(
        self,
        poll: select.epoll,
        report: Callable[[list[m.Report]], None],
        outputs: Iterable[str],
        seconds: Callable[[], float] = time.monotonic,
    ):
        self._poll, self._report, self._seconds = poll, report, seconds
        self._outputs = frozenset(outputs)
        self._by_fileno: dict[int, _Channel] = {}
        self._by_number: dict[int, _Channel] = {}
        self._requests: dict[int, tuple[_Channel, _Pending]] = {}
        """By the numbers in the engine."""
        self._pending: defaultdict[int, int] = defaultdict(int)
        """Their number, by user."""
        self._left: list[_Channel] = []
        """Those whose clients were found to have left, or not to read, when they were answered."""
        self._backlog: dict[int, _Channel] = {}
        """Those with unhandled frames, by their numbers."""
        self._handled: defaultdict[int, int] = defaultdict(int)
        """The frames that were handled in the present round, by user."""
        self._unreported: list[m.ChannelUse] = []
        self._busy_s = self._busy_at = 0.0
        self._report_at = math.inf
        self._closers: defaultdict[int, _Closer] = defaultdict(_Closer)
        """By user, who wait for their own descriptors alone."""

    @property
    def watched(self) -> list[tuple[int, int]]:
        """The descriptors of their sockets, with the events for which they are polled. Another
        thread may read this meanwhile.
        """
        found = [*self._by_fileno.values()]
        return [(channel.fileno, max(0, channel.polled)) for channel in found]

    @property
    def has_unsent(self) -> bool:
        """Whether a socket has not accepted all of its answers."""
        return any(channel.unsent for channel in self._by_number.values())

    @property
    def has_backlog(self) -> bool:
        """Whether frames were read and not handled."""
        return bool(self._backlog)

    def open_channel(self, opened: m.OpenChannel) -> None:
        """Serve a channel."""
        # A descriptor for which the process has no number left does not arrive.
        user = opened.owner.user
        if opened.fd < 0 or (user in self._closers and self._closers[user].waiting > UNCLOSED_MAX):
            if opened.fd >= 0:
                self._closers[user].close_soon(opened.fd)
            self._report([self._take_report([m.ChannelUse(opened.channel, closed=True)])])
            return
        # The daemon has checked it; given the family and the type, Python queries nothing.
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, opened.fd)
        channel = _Channel(opened, sock)
        self._by_fileno[channel.fileno] = self._by_number[opened.channel] = channel
        self._watch(channel)

    def close_channel(self, command: m.CloseChannel) -> list[m.Command]:
        """Close a channel; return the commands that drop its computations, if they are dropped."""
        channel = self._by_number.get(command.channel)
        if channel is None:
            return []
        if command.at_once:
            return self._end(channel)
        channel.closing = True
        self._close_if_done(channel)
        return []

    def read_round(self, ready: Iterable[tuple[int, int]]) -> list[m.Command]:
        """Return the commands for the engine from the descriptors that are *ready*, with their
        events, and from frames that were read before: `FRAMES_MAX` frames of each user.
        """
        self._handled.clear()
        commands: list[m.Command] = []
        backlog, self._backlog = [*self._backlog.values()], {}
        for channel in backlog:
            commands += self._read_channel(channel.fileno, 0)
        for fileno, events in ready:
            commands += self._read_channel(fileno, events)
        left, self._left = self._left, []
        for channel in left:  # the computations of those that have left are dropped
            commands += self._end(channel)
        return commands

    def _read_channel(self, fileno: int, events: int) -> list[m.Command]:
        channel = self._by_fileno.get(fileno)
        if channel is None:
            return []
        commands: list[m.Command] = []
        try:
            if events & ~(select.EPOLLIN | select.EPOLLOUT):
                raise _Left  # nobody reads answers to what it has sent before
            if events & select.EPOLLOUT:
                self._flush(channel)
            if not channel.closing and (events & select.EPOLLIN or channel.unhandled):
                self._read(channel, commands)
        except _Left:
            commands += self._end(channel)
        except (InferdError, *UNREADABLE) as exc:  # nothing after it can be understood
            error = exc if isinstance(exc, InferdError) else _unreadable(exc)
            with suppress(_Left):
                self._send(channel, (Kind.GOODBYE, error.to_wire()))
            commands += self._end(channel)
        return commands

    def _read(self, channel: _Channel, commands: list[m.Command]) -> None:
        if channel.unhandled:
            self._handle_frames(channel, commands)
        for _ in range(READS_MAX):
            if channel.unhandled or not self._may_read(channel):
                break
            try:
                data, descriptors, flags = read_with_descriptors(
                    channel.sock, READ_BYTES, SCM_MAX_FD, _DONTWAIT, shared=True
                )
            except BlockingIOError:
                break
            except OSError:
                raise _Left from None
            if descriptors:
                self._closer_of(channel).close_soon(*descriptors)
            if descriptors or flags & _TRUNCATED:
                raise ProtocolError("a channel takes no descriptors")
            if not data:
                raise _Left
            channel.unhandled += channel.frames.read_frames(data)
            self._handle_frames(channel, commands)
            if not channel.frames.pending:
                break
        if channel.unhandled:
            self._backlog[channel.opened.channel] = channel
        self._watch(channel)

    def _handle_frames(self, channel: _Channel, commands: list[m.Command]) -> None:
        user, frames = channel.opened.owner.user, channel.unhandled
        while frames and self._handled[user] < FRAMES_MAX and self._may_read(channel):
            self._handled[user] += 1
            commands += self._handle_request(channel, frames.popleft())

    def _handle_request(self, channel: _Channel, frame: bytes) -> Iterator[m.Command]:
        _, number, call, params = _read_request(frame)
        try:
            if call == "compute":
                if number in channel.pending:
                    raise ProtocolError(f"the request {number} is still under way")
                yield self._add_request(channel, number, _read_compute(params))
            elif call == "cancel":
                pending = channel.pending.get(_read_cancel(params).request)
                if pending is not None:
                    yield m.DropInput(pending.engine_number)
                    self._forget(channel, pending)
                    error = Cancelled("the client has cancelled the call")
                    self._send(channel, (Kind.ERROR, pending.number, error.to_wire()))
                self._send(channel, (Kind.REPLY, number, {}))
            else:
                raise InvalidArgument(
                    f"a channel takes compute and cancel, not {call[:50]!r}",
                    hint="use the connection to the daemon",
                )
        except ProtocolError:
            raise
        except InferdError as exc:
            self._send(channel, (Kind.ERROR, number, exc.to_wire()))
        except UNREADABLE as exc:
            unreadable = InvalidArgument(
                f"the params of {call[:50]} cannot be read: {exc}",
                hint="a channel takes inputs with their bytes, a priority and a queue timeout; make"
                " any other call on the connection to the daemon",
            )
            self._send(channel, (Kind.ERROR, number, unreadable.to_wire()))

    def _add_request(self, channel: _Channel, number: int, p: ChannelCompute) -> m.ComputeTensors:
        opened, wait_s = channel.opened, seconds_of(p.queue_timeout_s)
        given = priority_of(p.priority)
        priority = opened.priority if given is None else min(given, opened.priority_max)
        inputs: list[NamedTensor] = [
            (name, Tensor(one.data, one.dimensions, type_number(one.type)))
            for name, one in p.inputs
        ]
        channel.last = (channel.last + 1) % (1 << _NUMBER_BITS)  # far fewer are under way at once
        engine_number = opened.channel << _NUMBER_BITS | channel.last
        size = sum([len(tensor.data) for _, tensor in inputs])
        pending = _Pending(number, engine_number, size, priority)
        for name, one in p.inputs:
            if name in self._outputs:
                pending.spelled[name] = one.type
        now = self._seconds()
        if not self._requests:
            self._busy_at = now
        channel.priority = max(channel.priority, priority)
        channel.pending[number] = pending
        channel.held_bytes += size
        self._requests[engine_number] = channel, pending
        self._pending[opened.owner.user] += 1
        if not channel.is_reported:  # now: the computation may hang
            channel.is_reported = True
            self._report([self._take_report([channel.take_use()])])
            self._report_at = min(self._report_at, now + REPORT_S)
        return m.ComputeTensors(engine_number, inputs, Requester(opened.owner, priority), wait_s)

    def _forget(self, channel: _Channel, pending: _Pending) -> None:
        del channel.pending[pending.number]
        del self._requests[pending.engine_number]
        channel.held_bytes -= pending.size
        user = channel.opened.owner.user
        self._pending[user] -= 1
        if self._pending[user] == REQUESTS_MAX - 1:
            for one in self._by_number.values():
                if one.opened.owner.user == user:
                    self._watch(one)
        if not self._requests:
            self._busy_s += self._seconds() - self._busy_at

    # Answers.

    def take_reports(self, reports: Iterable[m.Report]) -> list[m.Report]:
        """Send the answers to channels, and return the reports for the daemon."""
        rest: list[m.Report] = []
        answered: dict[int, _Channel] = {}
        for report in reports:
            if not isinstance(report, m.CommandResult | m.Refused) or not channel_of(report.id):
                rest.append(report)
            elif (found := self._requests.get(report.id)) is not None:
                channel, pending = found
                channel.unsent += self._answer(channel, pending, report)
                self._forget(channel, pending)
                answered[channel.fileno] = channel
        for channel in answered.values():
            try:
                self._flush(channel)
            except _Left:
                self._left.append(channel)
            else:
                if channel.unsent and self._has_too_much_unsent(channel):
                    self._left.append(channel)
        if self._seconds() >= self._report_at:
            self._note_uses()
        if self._unreported:
            rest.append(self._take_report(self._unreported))
            self._unreported = []
        return rest

    def due_in(self) -> float | None:
        """Return the seconds until a report or a round of reads is due; None: none is."""
        if self._left or any(map(self._may_read, self._backlog.values())):
            return 0.0
        return None if self._report_at == math.inf else max(0.0, self._report_at - self._seconds())

    def _has_too_much_unsent(self, channel: _Channel) -> bool:
        size, channels = len(channel.unsent), self._by_number.values()
        if size > UNSENT_BYTES_MAX:
            return True
        if size <= BYTES_MAX // len(channels):
            return False
        return sum(len(one.unsent) for one in channels) > BYTES_MAX

    def _answer(
        self, channel: _Channel, pending: _Pending, report: m.CommandResult | m.Refused
    ) -> bytes:
        if isinstance(report, m.Refused):
            return pack_frame((Kind.ERROR, pending.number, report.error))
        channel.computed += 1
        computed: m.ComputedTensors = report.value
        channel.seconds += computed.seconds
        outputs = [
            (name, ChannelTensor(one.data, one.dimensions, spelled_type(one.type)))
            for name, one in computed.outputs
        ]
        if pending.spelled:
            pending.spell(outputs)
        size = sum([len(one.data) for _, one in outputs])
        if size > REPLY_BYTES_MAX:
            return pack_frame((Kind.ERROR, pending.number, reply_too_large(size).to_wire()))
        return pack_frame((Kind.REPLY, pending.number, ChannelResult(outputs)))

    def _take_report(self, uses: list[m.ChannelUse]) -> m.ChannelsUsed:
        """Return a report on *uses*, with the time in which any computation was under way."""
        if self._requests:
            now = self._seconds()
            self._busy_s += now - self._busy_at
            self._busy_at = now
        busy_s, self._busy_s = self._busy_s, 0.0
        return m.ChannelsUsed(uses, busy_s)

    def _note_uses(self) -> None:
        now, self._report_at = self._seconds(), math.inf
        for channel in self._by_number.values():
            if channel.is_reported:
                self._unreported.append(channel.take_use())
                channel.is_reported = bool(channel.pending)
                if channel.is_reported:
                    self._report_at = now + REPORT_S

    # Sockets.

    def _send(self, channel: _Channel, message: tuple[Any, ...]) -> None:
        channel.unsent += pack_frame(message)
        self._flush(channel)

    def _flush(self, channel: _Channel) -> None:
        try:
            while channel.unsent:
                del channel.unsent[: channel.sock.send(channel.unsent, _DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            raise _Left from None
        if channel.closing:
            self._close_if_done(channel)
        else:
            self._watch(channel)

    def _watch(self, channel: _Channel) -> None:
        """Poll the socket for what may be read from and sent to it now."""
        events = select.EPOLLOUT if channel.unsent else 0
        if not channel.closing and not channel.unhandled and self._may_read(channel):
            events |= select.EPOLLIN
        if channel.polled < 0:
            self._poll.register(channel.sock, events)
        elif events != channel.polled:
            self._poll.modify(channel.sock, events)
        channel.polled = events

    def _may_read(self, channel: _Channel) -> bool:
        size = channel.held_bytes + len(channel.unsent)
        bytes_max = min(CHANNEL_BYTES_MAX, BYTES_MAX // len(self._by_number))
        return size < bytes_max and self._pending[channel.opened.owner.user] < REQUESTS_MAX

    def _close_if_done(self, channel: _Channel) -> None:
        """Close a channel that the daemon closes, once its last answer was sent."""
        if channel.pending or channel.unsent:
            self._watch(channel)
        else:
            self._end(channel)

    def _end(self, channel: _Channel) -> list[m.Command]:
        """Close a channel; return the commands that drop its computations."""
        dropped: list[m.Command] = []
        if self._by_number.pop(channel.opened.channel, None) is None:
            return dropped
        for pending in tuple(channel.pending.values()):
            dropped.append(m.DropInput(pending.engine_number))
            self._forget(channel, pending)
        del self._by_fileno[channel.fileno]
        self._backlog.pop(channel.opened.channel, None)
        self._poll.unregister(channel.sock)
        with suppress(OSError):  # the client has left
            channel.sock.shutdown(socket.SHUT_RDWR)
        if _holds_data(channel.sock):  # and perhaps descriptors
            self._closer_of(channel).close_soon(channel.sock)
        else:
            channel.sock.close()
        self._unreported.append(channel.take_use(closed=True))
        return dropped

    def _closer_of(self, channel: _Channel) -> _Closer:
        return self._closers[channel.opened.owner.user]

    def close(self) -> None:
        """Close all channels."""
        for channel in tuple(self._by_number.values()):
            self._end(channel)


class _Left(Exception):
    """The client has closed its end."""


class _Closer:
    """Closes descriptors that a client has sent, and sockets that hold some, in a thread of its own
    from the first one on: a close takes as long as its sender wants, and the kernel makes it in the
    thread that reads a message without taking its descriptors. `waiting` and `close_soon` belong to
    the thread that has the turn.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[int | socket.socket] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """The descriptors and sockets whose close has not begun."""
        return self._waiting.qsize()

    def close_soon(self, *found: int | socket.socket) -> None:
        """Close descriptors, or sockets that were shut down, after those before."""
        for one in found:
            self._waiting.put(one)
        if self._thread is None and self.waiting:
            thread = threading.Thread(target=self._run, name="descriptors", daemon=True)
            with suppress(RuntimeError):  # no more threads now: the next call tries again
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            one = self._waiting.get()
            with suppress(OSError):  # it is closed all the same
                if isinstance(one, int):
                    close_descriptor(one)
                    continue
                for descriptor in unread_descriptors(one):
                    with suppress(OSError):
                        close_descriptor(descriptor)
                one.close()


def _holds_data(sock: socket.socket) -> bool:
    """Return whether a socket has data that were not read, beside which descriptors may be."""
    count = array("i", [0])
    try:
        fcntl.ioctl(sock, termios.FIONREAD, count)
    except OSError:
        return True
    return count[0] > 0


def _unreadable(exc: Exception) -> ProtocolError:
    return ProtocolError(f"a frame in the channel cannot be read: {exc}")


def reply_too_large(size: int) -> TooLarge:
    """Return the error of outputs that no reply takes."""
    return TooLarge(
        f"the outputs have {size} bytes; a reply has at most {REPLY_BYTES_MAX}",
        hint="let the outputs be written into a buffer",
        data={"bytes": size, "reply_bytes_max": REPLY_BYTES_MAX},
    )
