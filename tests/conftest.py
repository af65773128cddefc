"""Selection of tests that start no process, for `make check`; settings that shorten each run."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.fork_server import use_fork_servers
from tests.repetitions import load_profile
from tests.slow_imports import import_when_used

# Else each of some thousand processes compiles all modules: half of the tests' time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import_when_used()

# Shells without job control start commands in the background with Ctrl-C ignored, and the processes
# that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTERS = frozenset(
    (
        *("subprocess", "multiprocessing", "running_daemon", "RunningDaemon"),
        *("running_fleet", "inferd_process"),
    )
)
"""Names in a test module that show that its tests start processes."""
FIXTURES = frozenset(("daemon", "client", "raw", "machine", "fresh_machine"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-processes",
        action="store_true",
        help="run only tests that start no process and load no real model",
    )
    parser.addoption(
        "--all-answers",
        action="store_true",
        help="try all messages and all places of cuts with each chat template",
    )


TOGETHER = ("tests/gateways/http/web_page/", "tests/boot/")
"""Folders whose tests share a browser or a machine, and wait for it most of the time."""


class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each file to one worker, and all files of some folders to the same."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return next((folder for folder in TOGETHER if scope.startswith(folder)), scope)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored, in all children
    load_profile()
    use_fork_servers()
    subprocess.Popen.__init__ = _refuse_unmarked(subprocess.Popen.__init__)  # type: ignore[method-assign]


def _refuse_unmarked(start: Callable[..., None]) -> Callable[..., None]:
    """Return *start*, with an error for tests that `--no-processes` takes for some without one."""

    @functools.wraps(start)
    def checked(*args: Any, **kwargs: Any) -> None:
        if _running and not starts_process(_running[0]):
            raise RuntimeError("this test starts a process: mark it 'process'")
        start(*args, **kwargs)

    return checked


_running: list[pytest.Item] = []
"""The running test, if any: pytest itself may start processes."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a run of all tests by several processes, rewrite a share of the files for all processes.

    Pytest rewrites the assertions of each file at its first import, and keeps the result. In a
    fresh clone that takes 9 s of each process.
    """
    config = session.config
    given: dict[str, Any] = getattr(config, "workerinput", {})
    folder = Path(__file__).parent
    if given and [config.rootpath / path for path in config.args] == [folder]:
        with suppress(ImportError):  # these are pytest's own functions, not for others
            _rewrite_files(config, sorted(folder.rglob("test_*.py")), given)


def _rewrite_files(config: pytest.Config, files: list[Path], given: dict[str, Any]) -> None:
    from _pytest.assertion import rewrite

    state = config.stash[rewrite.assertstate_key]
    number, count = int(given["workerid"].removeprefix("gw")), given["workercount"]
    for file in files[number::count]:
        cache = rewrite.get_cache_dir(file)
        target = cache / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, target) is None and rewrite.try_makedirs(cache):
            found, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, found, target)


def pytest_testnodedown(node: Any, error: object) -> None:
    """Print the status of a process that has died: of a signal there may be no other trace."""
    if error:
        with suppress(AttributeError, subprocess.TimeoutExpired):  # these are xdist's own names
            status = node.gateway._io.popen.wait(timeout=10)
            sys.stderr.write(f"\n{node.gateway.id} has ended with the status {status}\n")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among the tests and their modules, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the other modules for the few tests that run alone."""
    if config.option.markexpr == "alone" and collection_path.name.startswith("test_"):
        return b"mark.alone" not in collection_path.read_bytes() or None
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    _running[:] = [item]


def pytest_runtest_teardown() -> None:
    _running.clear()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # the others compute meanwhile
        items.sort(key=lambda item: not item.nodeid.startswith(TOGETHER))
    if not config.getoption("--no-processes"):
        return
    dropped = [item for item in items if starts_process(item)]
    config.hook.pytest_deselected(items=dropped)
    kept = set(items) - set(dropped)
    items[:] = [item for item in items if item in kept]


def starts_process(item: pytest.Item) -> bool:
    """Return whether *item* starts a process or loads a real model, by its module and fixtures."""
    if any(item.get_closest_marker(name) for name in ("model", "process")):
        return True
    module = getattr(item, "module", None)
    fixtures = set(getattr(item, "fixturenames", ()))
    return bool(STARTERS.intersection(vars(module) if module else ()) or FIXTURES & fixtures)
