"""Processes of `inferd` in tests that are forked from one whose modules are imported.

Imports are four fifths of the CPU time of a daemon's start. A fork server for each kind of command
imports its modules once, and each process begins as a copy of it. From there on it is a process
like any other: a child of the one that runs the tests, with descriptors and an environment of its
own. Other commands, and those with another environment, are started as usual.

Such a daemon forks its workers from itself, since its server has imported their modules, too.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import itertools
import json
import logging
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, NoReturn

__all__ = ("ForkedProcess", "ForkedWorker", "use_fork_servers")

MODULES = {
    "serve": ("cli.operations.serve", "daemon.app"),
    "fleet node": ("gateways.fleet.command", "gateways.fleet.relay.relay", "cli.client"),
    "fleet serve": (
        *("gateways.fleet.command", "gateways.fleet.entry.server"),
        *("gateways.fleet.config", "cli.client"),
    ),
    "gateway": (
        *("gateways.http.command", "gateways.http.server", "gateways.http.app"),
        *("gateways.http.listening", "gateways.http.web_page.api"),
    ),
    "wasm": ("gateways.wasm.command", "gateways.wasm.runner"),
    "nnrpc": ("gateways.nnrpc.command", "gateways.nnrpc.server", "ipc.client"),
    "": (
        *("cli.client", "cli.one_shot", "cli.starting", "ipc.client"),
        *("cli.inference.run", "cli.inference.chat", "cli.operations.start"),
        *("cli.models.model_commands", "cli.monitoring.stats"),
        *("daemon.config.show", "daemon.logs.log_lines", "daemon.service.background"),
        *("daemon.doctor.examination", "daemon.doctor.report", "cli.operations.serve"),
    ),
}
"""By the first words of a command, what it imports of inferd; "" is every other command."""
PROGRAMS = (
    *("scheduler.worker", "backends.echo.media_program", "backends.llama.media.program"),
    "gateways.http.job_process",
)
"""The programs that a daemon starts and that can be forked from it."""
WORKER_MODULES = (
    *PROGRAMS,
    *("backends.echo.model", "backends.llama.model", "backends.llama.loading.loader"),
)
"""The modules of inferd that workers import."""
OTHERS = {
    **dict.fromkeys(("serve", "nnrpc"), ("anyio._backends._asyncio", "uvloop")),
    **dict.fromkeys(("fleet node", "fleet serve"), ("anyio._backends._asyncio", "encodings.idna")),
    "gateway": ("anyio._backends._asyncio", "encodings.idna", "uvicorn.loops.uvloop"),
}
"""What it imports of other packages at its start, if that is installed."""
VARIABLES = (
    *("GGML_NO_BACKTRACE", "HOME", "JOURNAL_STREAM", "NOTIFY_SOCKET", "PYTEST_CURRENT_TEST"),
    *("TERM", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"),
)
PREFIXES = ("INFERD_", "OTEL_", "WATCHDOG_")
"""Environment variables that may differ from the server's: nothing reads them while it imports, nor
in /proc, which shows the server's.
"""
OF_USERS = (
    *("COLORTERM", "COLUMNS", "COMP_CWORD", "COMP_WORDS", "LINES", "NO_COLOR", "PATH"),
    *("XDG_RUNTIME_DIR", "_INFERD_COMPLETE"),
)
"""Variables that may also differ for the commands without a server of their own."""
UNUSUAL = ("preexec_fn", "shell", "process_group", "uid", "gid", "gids", "umask")
"""Arguments of `subprocess.Popen` with which only a new interpreter is started."""
DOCTORS_CHILD = "inferd.daemon.doctor.checks.engine_child"
"""The program that loads the engine for `inferd doctor`."""
REQUEST_BYTES_MAX = 1 << 20
DESCRIPTORS_MAX = 64
_CLONE3, _CLONE_PARENT = 435, 0x8000
"""The system call's number, the same on all architectures, and its flag."""


class ForkedProcess(subprocess.Popen[bytes]):
    """`subprocess.Popen` for commands of `inferd`, forked where possible."""

    def _execute_child(self, *arguments: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(execute).bind(*arguments).arguments
        server = _server_of([os.fsdecode(word) for word in given["args"]], given)
        if server is None:
            execute(*arguments)
            return
        standard = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        passed = {number: number for number in given["pass_fds"]}
        passed |= {n: (n if own == -1 else own) for n, own in enumerate(standard)}
        environment = given["env"] or os.environ
        request = {
            "arguments": [os.fsdecode(word) for word in given["args"]],
            "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "numbers": list(passed),
            "new_session": given["start_new_session"],
        }
        pid = server.fork(request, list(passed.values()))
        if pid < 0:
            execute(*arguments)
            return
        self.pid, self._child_created = pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]


class ForkedWorker(subprocess.Popen[bytes]):
    """`subprocess.Popen` for workers in a daemon that was forked with their modules."""

    environment: Mapping[str, str] = {}
    """The environment in which the modules were imported."""

    def _execute_child(self, *arguments: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(execute).bind(*arguments).arguments
        _, *words = given["args"]
        known = words[:2] == ["-P", "-m"] and words[2].removeprefix("inferd.") in PROGRAMS
        if not known or not _are_alike(self.environment, given["env"]):
            execute(*arguments)
            return
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_worker(given)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]


def _run_worker(given: Mapping[str, Any]) -> None:
    """Run the worker in the new process, as a new interpreter would, and end it."""
    status = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        standard = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        _place([*standard, *given["pass_fds"]], [0, 1, 2, *given["pass_fds"]])
        os.environ.clear()
        os.environ.update(given["env"])
        logging.root.handlers.clear()
        sys.argv = [given["args"][0], *given["args"][4:]]
        sys.modules[given["args"][3]].main()
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def use_fork_servers() -> None:
    """Start daemons of tests by fork servers, which have this process's environment of now."""
    from inferd.testing import RunningDaemon  # not in the servers

    _environment.update(os.environ)
    RunningDaemon._start_process = ForkedProcess


class _Server:
    """The running server of one kind of command. Any thread may use it."""

    def __init__(self, kind: str) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, kind, str(number)],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                env=_environment,
            )
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
        atexit.register(self._close)

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Start a process, and return its id; -1: the system does not permit that."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = self._socket.recv(64)
        assert answer, "the fork server has ended"
        return int(answer)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


_environment: dict[str, str] = {}
_servers: dict[str, _Server] = {}
_lock = threading.Lock()


def _server_of(arguments: Sequence[str], given: Mapping[str, Any]) -> _Server | None:
    """Return the server for a command, or None if only a new interpreter can run it."""
    kind = _kind_of(arguments)
    if kind is None or any(given.get(name) not in (None, False, -1) for name in UNUSUAL):
        return None
    environment = given["env"] or os.environ
    if not _are_alike(_environment, environment, () if kind else OF_USERS):
        return None
    with _lock:
        if kind not in _servers:
            _servers[kind] = _Server(kind)
    return _servers[kind]


def _are_alike(
    first: Mapping[str, str], second: Mapping[str, str], others: Sequence[str] = ()
) -> bool:
    """Return whether two environments have the same variables, except those that may differ."""
    differing = {name for name, _ in first.items() ^ second.items()}.difference(VARIABLES, others)
    return all(name.startswith(PREFIXES) for name in differing)


def _kind_of(arguments: Sequence[str]) -> str | None:
    """Return the kind of a command of `inferd` or a script, or None of another program."""
    if list(arguments) == [sys.executable, "-P", "-m", DOCTORS_CHILD]:
        return "serve"  # its server has imported the engine
    executable, option, program, *rest = *arguments, "", "", ""
    ours = option == "-c" or (option, program) == ("-m", "inferd")
    if executable == sys.executable and option.endswith(".py"):
        return ""
    if executable != sys.executable or not ours:
        return None
    kind = " ".join(rest[:2]) if rest[0] == "fleet" else rest[0]
    return kind if kind in MODULES else ""


def _serve(requests: socket.socket, kind: str) -> dict[str, Any]:
    """Fork for each request until the other end is closed; in the new process, return it."""
    if kind == "serve":  # it hides rich from structlog
        sys.modules["rich"] = None  # type: ignore[assignment]
    for name in MODULES[kind]:
        importlib.import_module(f"inferd.{name}")
    for name in OTHERS.get(kind, ()):
        with suppress(ImportError):
            importlib.import_module(name)
    if kind == "serve":
        _prepare_workers()
        sys.modules.pop("rich", None)  # elsewhere structlog may have imported parts of it
    gc.collect()
    gc.freeze()
    while True:
        text, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
        if not text:
            sys.exit()
        try:
            pid = _fork_sibling()
        except OSError:  # a container may forbid the system call
            pid = -1
        if pid == 0:
            requests.close()
            request: dict[str, Any] = json.loads(text)
            if request["new_session"]:
                os.setsid()
            _place(descriptors, request["numbers"])
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _prepare_workers() -> None:
    """Import what workers do, in their environment, and have daemons fork them."""
    from inferd.daemon.workers import process

    own = dict(os.environ)
    os.environ.update(process.environment_of_workers())
    ForkedWorker.environment = dict(os.environ)
    for name in WORKER_MODULES:
        importlib.import_module(f"inferd.{name}")
    os.environ.clear()
    os.environ.update(own)
    process.Spawner._popen = ForkedWorker


def _fork_sibling() -> int:
    """Fork as `os.fork` does, but as a child of this process's parent."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    call = struct.pack("=11Q", _CLONE_PARENT, *[0] * 10)
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(ctypes.c_long(_CLONE3), call, ctypes.c_size_t(len(call)))
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the process's own descriptors the numbers that it expects, and close all others."""
    own = list(descriptors)
    for index, number in enumerate(numbers):
        if number in own[index + 1 :]:
            moved = os.dup(number)
            own = [moved if descriptor == number else descriptor for descriptor in own]
        os.dup2(own[index], number)
        os.set_inheritable(number, True)  # dup2 does not, if it has the number already
    kept = sorted({2, *numbers, os.sysconf("SC_OPEN_MAX")})
    for last, following in itertools.pairwise(kept):
        os.closerange(last + 1, following)


def _open_stream(name: str) -> None:
    """Open a standard stream as an interpreter does at its start: buffers depend on the file."""
    old: TextIOWrapper = getattr(sys, f"__{name}__")
    number, mode = old.fileno(), "r" if name == "stdin" else "w"
    stream = open(number, mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
    assert isinstance(stream, TextIOWrapper)
    if mode == "w":
        lines = name == "stderr" or os.isatty(number)
        stream.reconfigure(line_buffering=lines, write_through=old.write_through)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _run(request: Mapping[str, Any]) -> None:
    """Run the command of a request, as a new interpreter would."""
    for name in ("stdin", "stdout", "stderr"):
        _open_stream(name)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    option, *rest = request["arguments"][1:]
    if option == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif option == "-P":
        importlib.import_module(rest[1]).main()
    elif option == "-m":
        from inferd import __main__ as module
        from inferd.cli import main

        sys.path.insert(0, request["folder"])
        sys.argv = [str(module.__file__), *rest[1:]]
        main()
    else:
        sys.path.insert(0, os.path.dirname(option))
        sys.argv = [option, *rest]
        runpy.run_path(option, run_name="__main__")


def _run_and_exit(request: Mapping[str, Any]) -> NoReturn:
    """Run the command of a request, and end as an interpreter would, except that objects are not
    destroyed: that copies all memory which this process shares with others.
    """
    status: object = None
    try:
        _run(request)
    except SystemExit as exc:
        status = exc.code
    except BaseException as exc:
        sys.excepthook(type(exc), exc, exc.__traceback__)
        status = 1
        if isinstance(exc, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if status is not None and not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # a pipe without a reader
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # of the terminal, for the tests
        _request = _serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[1])
    _run_and_exit(_request)
