"""Attacks with loads: many small files, each loaded from a descriptor."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from bench.attack.attack import Attack, Target, run_at_once
from inferd import Client, InferdError
from tests.tiny_gguf import write_tiny

FILES = 60


def load_files(target: Target) -> None:
    """Load many small files at once, unload them, and begin again."""
    file = write_tiny("llama", target.folder)
    copies = [file.with_name(f"{number}.gguf") for number in range(FILES)]
    for copy in copies:
        copy.write_bytes(file.read_bytes())
    run_at_once(target, [partial(_load_often, file=copy) for copy in copies])


def _load_often(target: Target, file: Path) -> None:
    with Client(target.socket) as client:
        while not target.is_over():
            with contextlib.suppress(InferdError):
                graph = client.load_file(file)
                client.unload(graph)


ATTACKS = (Attack("model-loads", "60 small files, loaded from descriptors", load_files),)
