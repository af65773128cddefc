"""The commands that compare this checkout with a commit, and that profile a call."""

from __future__ import annotations

from typing import Any

import pytest

from tools.call_profile.__main__ import profile
from tools.compare_with_commit import differences


@pytest.mark.parametrize(
    ("old", "same", "new", "found"),
    [
        ({"a": 1}, {"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 1}, {"a": 2}, [".a: 1 became 2"]),
        ({"a": 1}, {"a": 3}, {"a": 2}, []),
        ({"a": 1}, {"a": 3}, {"a": "2"}, [".a: 1 became '2', of another type"]),
        ({"a": 1}, {"a": 1}, {"b": 1}, [".a: is gone", ".b: is new"]),
        ({"a": [1, 2]}, {"a": [1, 2]}, {"a": [1, 3]}, [".a[1]: 2 became 3"]),
        ({"a": [1]}, {"a": [1]}, {"a": []}, [".a: [1] became []"]),
        ({"wait_ms": 1}, {"wait_ms": 1}, {"wait_ms": 9}, []),
    ],
)
def test_differences_are_those_that_two_answers_of_the_old_side_lack(
    old: Any, same: Any, new: Any, found: list[str]
) -> None:
    assert list(differences(old, same, new)) == found


@pytest.mark.process
def test_a_profile_has_the_files_of_each_process_in_the_order_of_the_call() -> None:
    daemon, worker = profile("echo", 4)
    assert (daemon.name, worker.name) == ("daemon", "worker")
    for process, file in ((daemon, "daemon/calls/turns.py"), (worker, "scheduler/engine/steps.py")):
        assert file in process.functions
        assert process.calls >= sum(map(len, process.functions.values()))
    files = list(daemon.functions)
    assert files.index("ipc/server/server.py") < files.index("daemon/calls/turns.py")
