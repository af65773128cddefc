"""Decisions on memory without processes: smaller shapes, free memory."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from inferd.backends import MemoryNeed, ModelSpec, Shape, estimate_memory
from inferd.backends.errors import (
    BackendError,
    InferdError,
    InvalidArgument,
    LoadFailed,
    ModelNotFound,
    OutOfMemory,
    Timeout,
)
from inferd.daemon.models.specs import FailedLoads
from inferd.daemon.residency.machine import (
    MachineMemory,
    OomKills,
    cgroup_folders,
    cgroup_free_bytes,
    headroom_bytes,
    parse_available_bytes,
    parse_cgroup_path,
)
from inferd.daemon.residency.plan import (
    ADDRESS_SPACE_BYTES,
    growth_refusal,
    memory_refusal,
    smaller_shape,
    with_address_space,
    with_sizes,
)
from tests.sparse_gguf import TOKEN_BYTES, write_sparse

GIB = 1 << 30


def test_slots_shrink_first_then_the_context_then_the_batch() -> None:
    shape, floor = Shape(4, 4096, 512), Shape(1, 1024, 128)
    steps = []
    while (found := smaller_shape(shape, floor)) is not None:
        shape = found
        steps.append(found)
    assert steps == [
        Shape(2, 4096, 512),
        Shape(1, 4096, 512),
        Shape(1, 2048, 512),
        Shape(1, 1024, 512),
        Shape(1, 1024, 256),
        Shape(1, 1024, 128),
    ]


def test_requested_parameters_do_not_shrink() -> None:
    assert smaller_shape(Shape(3, 2048, 64), Shape(3, 2048, 64)) is None
    assert smaller_shape(Shape(4, 4096, 512), Shape(4, 3000, 512)) == Shape(4, 3000, 512)
    assert smaller_shape(Shape(3, 512, 128), Shape(1, 512, 128)) == Shape(1, 512, 128)


def test_a_failed_load_carries_the_memory_that_it_needs_and_has() -> None:
    need = MemoryNeed(weights=3 * GIB, context=GIB)
    sizes = {"needed_bytes": 4 * GIB, "free_bytes": GIB, "weights_bytes": 3 * GIB, "slots": 4}
    failed = with_sizes(LoadFailed("no", hint="h", data={"cause": "died"}), need, 4, 0, GIB)
    assert (type(failed), failed.message, failed.hint) == (LoadFailed, "no", "h")
    assert failed.data == sizes | {"cause": "died"}
    short = with_sizes(OutOfMemory("no", hint="h"), need, 4, 512, GIB)
    assert short.data == sizes | {"ctx_size": 512}
    assert "needs 4.29 GB with 4 slots of 512 tokens, and 1.07 GB are free" in short.message
    for error in (InvalidArgument("no"), LoadFailed("cut off", data={"needed_bytes": 7})):
        assert with_sizes(error, need, 4, 0, GIB) is error


def test_a_model_of_14_billion_parameters_is_fitted_into_11_gb_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    path = write_sparse(tmp_path / "large.gguf")
    spec = ModelSpec(name="large", path=str(path))
    used_before = psutil.Process().memory_info().rss
    with contextlib.closing(estimate_memory(spec)) as estimate:
        shape: Shape | None = estimate.shape
        needs = []
        while shape is not None:
            # The process of the tests is larger, the more of them it has run.
            needs.append(replace(estimate.need(shape), process=200 * 10**6))
            if needs[-1].total <= 11 * 10**9:
                break
            shape = smaller_shape(shape, Shape(1, 512, 128))
        assert shape == Shape(2, 4096, 512)
    whole, fitted = needs
    assert whole.total > 11 * 10**9 >= fitted.total
    assert whole.context - fitted.context == pytest.approx(2 * 4096 * TOKEN_BYTES, rel=0.001)
    assert psutil.Process().memory_info().rss - used_before < 5 * 10**8


# Refusals.


def test_a_refusal_has_both_numbers_and_says_what_helps() -> None:
    need = MemoryNeed(weights=10**9, context=3 * 10**9)
    shape = Shape(2, 8192, 512)
    error = memory_refusal(
        "big", need, shape, shape, free=2 * 10**9, pinned=[("a", 1), ("b", 10**9)]
    )
    assert "4 GB" in error.message and "2 GB are free" in error.message
    assert "smaller ctx-size than 8192" in error.hint and "fewer slots than 2" in error.hint
    assert "unload b (1 GB)" in error.hint
    assert error.data["needed_bytes"] == 4 * 10**9 and error.data["free_bytes"] == 2 * 10**9
    assert error.data["total_bytes"] == 3 * 10**9 + 1


def test_where_the_weights_alone_do_not_fit_a_smaller_context_is_no_advice() -> None:
    need, shape = MemoryNeed(weights=10**10), Shape(4, 8192, 512)
    error = memory_refusal("big", need, shape, shape, free=-5, pinned=[])
    assert "smaller model" in error.hint and "ctx-size" not in error.hint
    assert error.data["free_bytes"] == 0


def test_a_refusal_names_memory_bytes_as_the_limit() -> None:
    need, shape = MemoryNeed(weights=4 * GIB), Shape(1, 512, 512)
    small = partial(memory_refusal, "big", need, shape, shape, free=GIB, pinned=[], limit=2 * GIB)
    error = small(machine_free=8 * GIB)
    assert "1.07 GB are free of the 2.15 GB that memory-bytes allows" in error.message
    assert error.hint.startswith("raise memory-bytes (2.15 GB), or use a smaller model")
    short = small(machine_free=2 * GIB)
    assert "memory-bytes allows" in short.message
    assert "raise" not in short.hint, "the machine would not have the memory either"
    grown = growth_refusal("big", GIB, 0, limit=2 * GIB)
    assert "of the 2.15 GB that memory-bytes allows" in grown.message
    assert "memory-bytes" not in growth_refusal("big", GIB, 0).message


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("no context"),
        BackendError("the thread 'x' cannot be started"),
        LoadFailed("loading ended the worker process", data={"cause": "died"}),
    ],
)
def test_a_small_address_space_is_named_as_the_cause(error: InferdError) -> None:
    limited = with_address_space(error, GIB, GIB)
    assert type(limited) is type(error) and limited.message.startswith(error.message)
    assert "limited to 1.07 GB (ulimit -v)" in limited.message
    assert "ulimit -v" in limited.hint and limited.data.items() >= error.data.items()
    for limit in (None, GIB + ADDRESS_SPACE_BYTES):
        assert with_address_space(error, GIB, limit) is error


def test_an_address_space_does_not_excuse_a_damaged_file() -> None:
    for error in (LoadFailed("the file is damaged"), ModelNotFound("gone")):
        assert with_address_space(error, GIB, 1) is error


# Free memory.

MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\nHuge: 0\n"


def test_the_headroom_is_a_twentieth_of_the_machine() -> None:
    assert parse_available_bytes(MEMINFO) == 8 * GIB - 16 * GIB // 20
    assert headroom_bytes(100 * GIB) == GIB


def test_the_cgroup_is_the_one_of_version_2() -> None:
    assert parse_cgroup_path("4:memory:/old\n0::/system.slice/inferd.service\n") == (
        "/system.slice/inferd.service"
    )
    assert parse_cgroup_path("4:memory:/old\n") == "/"


def limit(folder: Path, most: str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file {cache}\ninactive_file 0\n")


def free_in(cgroups: Path, path: str) -> int | None:
    return cgroup_free_bytes(cgroup_folders(cgroups, f"0::{path}\n", "memory"))


def test_the_tightest_limit_on_the_path_holds(tmp_path: Path) -> None:
    limit(tmp_path / "a" / "b", "max", 7)
    limit(tmp_path / "a", str(4 * GIB), 3 * GIB)
    assert free_in(tmp_path, "/a/b") == GIB - 4 * GIB // 20
    limit(tmp_path / "a" / "b", str(2 * GIB), 2 * GIB)
    assert free_in(tmp_path, "/a/b") == -(2 * GIB // 20)


def test_the_page_cache_counts_as_free(tmp_path: Path) -> None:
    limit(tmp_path, str(2 * GIB), 2 * GIB, cache=GIB)
    assert free_in(tmp_path, "/") == GIB - 2 * GIB // 20


def test_without_limits_there_is_none(tmp_path: Path) -> None:
    assert free_in(tmp_path, "/a/b") is None
    limit(tmp_path / "a", "max", 5)
    assert free_in(tmp_path, "/a") is None


def test_the_machine_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/a\n")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").write_text("100 30 10 1 0 5 0\n")
    machine = MachineMemory(tmp_path, tmp_path / "cgroups")
    assert machine.free_bytes() == parse_available_bytes(MEMINFO)
    limit(tmp_path / "cgroups" / "a", str(GIB), 0)
    assert machine.free_bytes() == GIB - GIB // 20
    assert machine.anonymous_bytes(7) == 20 * 4096
    assert machine.anonymous_bytes(8) == 0


def write_kills(events: Path, count: int) -> None:
    events.parent.mkdir(parents=True, exist_ok=True)
    events.write_text(f"low 0\noom 9\noom_kill {count}\noom_group_kill 0\n")


@pytest.mark.parametrize("counter", ["cgroups/a/memory.events", "vmstat"])
def test_each_oom_kill_is_claimed_once(tmp_path: Path, counter: str) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/a\n")
    write_kills(tmp_path / counter, 3)
    kills = OomKills(tmp_path, tmp_path / "cgroups")
    assert not kills.claim_kill()
    write_kills(tmp_path / counter, 5)
    assert [kills.claim_kill() for _ in range(3)] == [True, True, False]
    write_kills(tmp_path / counter, 6)
    kills.note_kills()
    assert not kills.claim_kill(), "it was another process"


def test_without_a_counter_there_are_no_oom_kills(tmp_path: Path) -> None:
    assert not OomKills(tmp_path, tmp_path).claim_kill()


def test_this_machine_has_some_free() -> None:
    machine = MachineMemory()
    assert machine.free_bytes() != 0
    assert machine.anonymous_bytes(1) >= 0


# Failed loads.

ASKED = ("ctx-size", 512)


class Clock:
    """A clock that the test advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(failed: FailedLoads, file: Path) -> InferdError | None:
    try:
        failed.check_load("m", [file], ASKED)
    except InferdError as exc:
        return exc
    return None


def test_a_failed_load_is_remembered_for_its_time(tmp_path: Path, clock: Clock) -> None:
    failed, file = FailedLoads(10.0, clock), tmp_path / "m.gguf"
    failed.note_load("m", [file], ASKED, LoadFailed("cannot open it", hint="look", data={"a": 1}))
    clock.now += 4
    error = refused(failed, file)
    assert isinstance(error, LoadFailed) and error.hint == "look"
    assert "cannot open it" in error.message and "4.0 s ago" in error.message
    assert error.data == {"a": 1, "failed_s_ago": 4.0, "retry_in_s": 6.0}
    clock.now += 6
    assert refused(failed, file) is None


def test_another_way_of_loading_is_tried_at_once(tmp_path: Path, clock: Clock) -> None:
    failed, file = FailedLoads(10.0, clock), tmp_path / "m.gguf"
    failed.note_load("m", [file], ASKED, LoadFailed("too large"))
    failed.check_load("m", [file], ("ctx-size", 256))
    assert refused(failed, file) is not None


def test_a_file_that_has_changed_is_tried_at_once(tmp_path: Path, clock: Clock) -> None:
    failed, file = FailedLoads(10.0, clock), tmp_path / "m.gguf"
    failed.note_load("m", [file], ASKED, LoadFailed("missing"))
    assert refused(failed, file) is not None
    file.write_bytes(b"G")
    assert refused(failed, file) is None
    for change in (
        lambda: file.write_bytes(b"GG"),
        lambda: file.chmod(0o600),
        lambda: (file.rename(tmp_path / "old"), file.write_bytes(b"GG")),
        lambda: file.unlink(),
    ):
        failed.note_load("m", [file], ASKED, LoadFailed("damaged"))
        assert refused(failed, file) is not None
        change()
        assert refused(failed, file) is None


@pytest.mark.parametrize(
    ("error", "remembered"),
    [
        (LoadFailed("x"), True),
        (LoadFailed("x", data={"cause": "died"}), False),
        (InvalidArgument("x"), True),
        (OutOfMemory("x", data={"needed_bytes": 5, "total_bytes": 4}), True),
        (OutOfMemory("x", data={"needed_bytes": 5, "total_bytes": 5}), False),
        (Timeout("x"), False),
    ],
)
def test_only_permanent_failures_are_remembered(
    error: InferdError, remembered: bool, tmp_path: Path, clock: Clock
) -> None:
    failed = FailedLoads(10.0, clock)
    failed.note_load("m", [tmp_path], ASKED, error)
    assert (refused(failed, tmp_path) is not None) == remembered


def test_failures_are_bounded_and_can_be_switched_off(tmp_path: Path, clock: Clock) -> None:
    failed = FailedLoads(10.0, clock)
    for number in range(1500):
        failed.note_load(f"m{number}", [], ASKED, LoadFailed("x"))
    failed.check_load("m0", [], ASKED)
    with pytest.raises(LoadFailed):
        failed.check_load("m1499", [], ASKED)
    off = FailedLoads(0.0, clock)
    off.note_load("m", [], ASKED, LoadFailed("x"))
    off.check_load("m", [], ASKED)
