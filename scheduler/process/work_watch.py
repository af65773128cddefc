"""A thread that ends a slice of the idle measurement as soon as the engine gets work."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_BEGIN, _END, _CLOSE = b"b", b"e", b"c"


class WorkWatch:
    """Watches descriptors that are readable once the engine has work. The engine's thread owns it,
    and does not read them meanwhile. The thread runs from the first slice until `close`.
    """

    def __init__(self, filenos: list[int]):
        self._filenos = filenos
        self._orders, self._order = os.pipe()
        self._thread: threading.Thread | None = None
        self._on_work: Callable[[], None] = lambda: None
        self._has_work = False

    @contextmanager
    def __call__(self, on_work: Callable[[], None]) -> Iterator[Callable[[], bool]]:
        """Call *on_work* once when a descriptor becomes readable; see `WorkWatch` in the engine."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="work-watch", daemon=True)
            self._thread.start()
        self._on_work, self._has_work = on_work, False
        os.write(self._order, _BEGIN)
        try:
            yield lambda: self._has_work
        finally:
            os.write(self._order, _END)

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        if self._order < 0:
            return
        os.write(self._order, _CLOSE)
        if self._thread is not None:
            self._thread.join()
        os.close(self._orders)
        os.close(self._order)
        self._order = -1

    def _run(self) -> None:
        watched = select.poll()  # `select` rejects descriptors from 1024 on
        for fileno in (*self._filenos, self._orders):
            watched.register(fileno, select.POLLIN)
        while (order := os.read(self._orders, 1)) != _CLOSE:
            if order == _BEGIN and all(fd != self._orders for fd, _ in watched.poll()):
                self._has_work = True
                self._on_work()
