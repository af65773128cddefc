"""The confinement of a process's threads to some cores, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading
from inferd.scheduler.engine.affinity import Affinity

own = sorted(os.sched_getaffinity(0))
affinity = Affinity()
ends = threading.Event()
thread = threading.Thread(target=ends.wait)
thread.start()

def cores(number):
    return [own.index(core) for core in sorted(os.sched_getaffinity(number))]

for count, first in ((1, 0), (1, 1), (1, len(own)), (None, 0), (len(own) + 1, 3)):
    affinity.use_cores(count, first)
    print(cores(0), cores(thread.native_id))
ends.set()
"""


@pytest.mark.process
def test_all_threads_run_on_the_cores_from_the_first_one_on() -> None:
    number = len(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    every, second = list(range(number)), [1 % number]
    expected = [[0], second, [0], every, every]
    assert done.stdout.splitlines() == [f"{cores} {cores}" for cores in expected]
