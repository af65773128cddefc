"""A folder that another thread changes without pause."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def changing(*files: Path) -> Iterator[None]:
    """Make *files* and delete their folders, over and over, as long as the context is open."""
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            for file in files:
                file.parent.mkdir(parents=True)
                file.write_bytes(b"content")
            for file in files:
                shutil.rmtree(file.parent)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
