"""Chat templates that need too much time, memory or output, and a victim on the same model."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from inferd.backends.errors import InvalidArgument, LoadFailed, Timeout, TooLarge
from inferd.backends.llama.text import renderer as renderer_module
from inferd.backends.llama.text.renderer import CPU_S_MAX, Renderer
from inferd.backends.llama.text.template import ChatTemplate, configured_renderer
from inferd.backends.model_spec import ModelSpec
from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

USER = [{"role": "user", "content": "Hi"}]
LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
LISTS = (
    "{% set a = [messages|length - 1] * 4000000 %}{% set b = [messages|length - 1] * 4000000 %}"
    "{{ ([a] * 4000) == ([b] * 4000) }}"
)
"""A single comparison of 16 · 10⁹ pairs, in which the interpreter handles no signal."""
NESTED = "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor %}"
GROWING = "{% set x = [0] * 6000000 %}{{ x + x + x + x }}"
"""It fills little more than half of the memory, so that it takes little CPU time."""
CONSTANT = "{{ 'a'|center(299999)|replace(' ', 'ab ')" + "|title" * 60 + " }}"
"""Constant expressions are computed when the template is compiled."""
BOMBS = {
    "center": ("{{ messages[0].content|center(20000000000) }}", "memory_bytes_max"),
    "center of a constant": ("{{ 'a'|center(20000000000) }}", "memory_bytes_max"),
    "format": ("{{ '%999999999d' % messages|length }}", "memory_bytes_max"),
    "texts": ("{% set x = 'x' * 9999999 %}{{ ([x] * 1000) | join }}", "memory_bytes_max"),
    "list": (GROWING, "memory_bytes_max"),
    "empty loops": (LOOPS, "cpu_s_max"),
    "one call": (LISTS, "cpu_s_max"),
    "output": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters_max"),
    "one text": ("{{ 'x' * 9999999 }}{{ 'x' * 9999999 }}", "characters_max"),
}


Processes = Callable[[], list[psutil.Process]]


@pytest.fixture
def normal_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave slow renderings their priority, so that they reach the limit on CPU time soon."""
    monkeypatch.setattr(renderer_module, "SLOW_S", 60.0)


@pytest.fixture
def processes() -> Processes:
    """Return a function that returns the child processes that the test has started."""
    before = set(psutil.Process().children())
    return lambda: [p for p in psutil.Process().children() if p not in before]


@contextmanager
def template(source: str) -> Iterator[ChatTemplate]:
    renderer = Renderer(source)
    with closing(ChatTemplate(renderer, bos="<s>", eos="</s>", strip_bos=True)) as chat_template:
        yield chat_template


@pytest.mark.process
@pytest.mark.usefixtures("normal_priority")
@pytest.mark.parametrize(("source", "limit"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_gives_an_error_that_names_the_limit(source: str, limit: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with template(source) as bomb, pytest.raises(TooLarge) as caught:
        bomb.render(USER)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    assert list(caught.value.data) == [limit]
    assert f"more than {caught.value.data[limit]} " in caught.value.message
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3 * CPU_S_MAX


@pytest.mark.process
@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        NESTED + "{{ n.x }}",
        NESTED + "{{ n.x | tojson }}",
        "{{ raise_exception('x' * 9999999) }}",
        "{{ '\\ud800' }}",
    ],
    ids=["calls", "nested lists", "nested JSON", "long error", "half a character"],
)
def test_a_template_s_own_error_is_short_and_typed(source: str) -> None:
    with template(source) as bomb, pytest.raises(InvalidArgument) as caught:
        bomb.render(USER)
    assert len(caught.value.message) < 2000


@pytest.mark.process
def test_a_bomb_in_the_configuration_fails_the_load() -> None:
    with pytest.raises(LoadFailed, match=f"more than {CPU_S_MAX} s of CPU time"):
        configured_renderer(ModelSpec(name="t", chat_template=CONSTANT))


@pytest.mark.process
def test_the_next_messages_are_rendered_after_a_bomb() -> None:
    source = "{{ messages[0].content|center(messages[0].size) }}"
    with template(source) as sometimes:
        for _ in range(2):
            assert sometimes.render([{"content": "a", "size": 3}]) == " a "
            with pytest.raises(TooLarge):
                sometimes.render([{"content": "a", "size": 20_000_000_000}])


@pytest.mark.process
def test_a_template_that_never_compiles_is_tried_once() -> None:
    with closing(Renderer(CONSTANT)) as renderer:
        causes = []
        for _ in range(2):
            with pytest.raises(TooLarge) as caught:
                renderer.render({})
            causes.append(caught.value)
    assert causes[0] is causes[1]


@pytest.mark.process
def test_a_process_that_somebody_killed_is_replaced(processes: Processes) -> None:
    with template("{{ messages[0].content }}") as plain:
        assert plain.render(USER) == "Hi"
        [child] = processes()
        child.kill()
        assert plain.render(USER) == "Hi"


@pytest.mark.process
@pytest.mark.parametrize("killed", [False, True], ids=["lives", "killed"])
def test_a_process_may_start_before_its_template_is_known(
    processes: Processes, killed: bool
) -> None:
    with closing(Renderer()) as renderer:
        renderer.start_process()
        [child] = processes()
        if killed:
            child.kill()
            wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)
        renderer.set_source("{{ x }}")
        assert renderer.render({"x": "a"}) == "a"
        assert (processes() == [child]) is not killed


@pytest.mark.process
def test_a_slow_rendering_gets_a_low_priority_and_its_process_is_replaced(
    monkeypatch: pytest.MonkeyPatch, processes: Processes
) -> None:
    with template("{{ messages[0].content }}") as plain:
        plain.render(USER)
        [first] = processes()
        monkeypatch.setattr(renderer_module, "SLOW_S", 0.0)
        while first.is_running():
            assert plain.render(USER) == "Hi"
        [second] = processes()
        assert second.nice() == psutil.Process().nice()


@pytest.mark.process
def test_the_process_ends_with_its_template(processes: Processes) -> None:
    with template("{{ messages[0].content }}") as plain:
        plain.render(USER)
        [child] = processes()
    assert not child.is_running()


SHARED = "{% if messages[0].loops %}" + LOOPS + "{% endif %}{{ messages[0].content }}"


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[RunningDaemon]:
    """Run a daemon whose template computes for hours for some messages."""
    model = f"file = '{write_tiny('llama', tmp_path)}'\nchat-template = '{SHARED}'"
    with daemon_for_all(f"[models.shared]\n{model}\n[defaults]\nslots = 4\nctx-size = 512\n") as d:
        yield d


def apply_template(client: RawClient, **keys: object) -> int:
    """Request a rendering; return the request's id."""
    graph = client.call("load_by_name", name="shared")["graph"]
    messages = [{"role": "user", "content": "Hi", **keys}]
    return client.start_request("apply_template", graph=graph, messages=messages)


def test_a_victim_s_tokens_arrive_while_a_template_computes(shared: RunningDaemon) -> None:
    with client_of(shared, ADA) as ada, client_of(shared, BOB) as bob:
        context = bob.context("shared", '{"n-predict": 100, "ignore-eos": true}')
        bob.set_input(context, b"Once upon a time")
        bob.compute_single(context)

        bomb = apply_template(ada, loops=True)
        for _ in range(20):
            bob.compute_single(context)

        ada.socket.settimeout(0)
        with pytest.raises(BlockingIOError):  # no reply yet
            ada.read_message()
        ada.socket.settimeout(60)
        with pytest.raises((TooLarge, Timeout)) as caught:  # it has a low priority
            ada.wait_result(bomb)
        assert list(caught.value.data) in (["cpu_s_max"], ["wait_s_max"])
        assert bob.wait_result(apply_template(bob))["text"] == b"Hi"
