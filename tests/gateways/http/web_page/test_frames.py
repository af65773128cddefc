"""The time of the page's frames while a long answer grows.

The browser's trace has the CPU time of each task of the page's main thread. A frame is one task.
Its CPU time does not count the time of other processes: beside seven busy ones on two cores, the
longest frame took 37 ms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway
from tests.gateways.http.web_page.driver import WIDE, ask, choose, pages, show_answer

CONFIG = echo_model("echo", **{"ctx-size": 100_000})
OPTIONS = ()
CHARACTERS = 20_000
PIECE = 160
"""Characters of a frame: 9 600 in a second, many times those of a model."""
FRAME_MS_MAX = 50.0
RUNS = 3
TASKS_MIN = 10
ANSWER_MS_MAX = 100_000
WARM_UP = "$x$\n\n```python\nx = 1\n```"
"""The browser compiles the libraries when they are first used."""
CATEGORIES = ["disabled-by-default-devtools.timeline", "devtools.timeline", "toplevel"]
MAIN_THREAD = "CrRendererMain"
CODE = 'def function_{0}(value: int) -> str:\n    return f"{{value + {0}}}"  # of {0}\n\n'
MIXED = (
    "## Part {0}\n\nSome **bold** text with `code`, a [link](https://a.example/{0})"
    " and $x_{{{0}}}^2$. It goes on for a while, as answers of models do, and ends here.\n\n"
    "- one *item*\n- another, with `code`\n  - an inner one\n\n"
    "```python\n" + CODE * 3 + "```\n\n"
    "| a | b |\n|---|--:|\n| {0} | `x` |\n| c | $d$ |\n\n> quoted\n\n"
    "\\[\n\\sum_{{i=0}}^{{{0}}} \\frac{{1}}{{i}}\n\\]\n\n"
)
SHAPES = {
    "mixed": ("", MIXED, ""),
    "code without an end": ("```python\n", CODE, ""),
    "list": ("", "- item {0} with **bold** text and `code`\n  - inner {0}\n", ""),
    "table": ("| a | b | c |\n|---|---|---|\n", "| cell {0} | some text with `code` | {0} |\n", ""),
    "paragraph": ("", "word {0} **bold** `code` and so on, ", ""),
    "formulas": (
        "",
        "Then $a_{{{0}}} + b$ holds, and \\(c\\).\n\n$$ \\frac{{1}}{{{0}}} $$\n\n",
        "",
    ),
}


def long_text(shape: str, characters: int = CHARACTERS) -> str:
    begin, repeated, end = SHAPES[shape]
    text, number = begin, 0
    while len(text) < characters:
        text += repeated.format(number)
        number += 1
    return text + end


def needs_another_run(longest: Sequence[float]) -> bool:
    """Return whether no run was short yet. The work of each is the same, and other programs, which
    share the caches, only make it longer.
    """
    return min(longest, default=FRAME_MS_MAX) >= FRAME_MS_MAX and len(longest) < RUNS


@contextmanager
def traced_tasks(browser: Browser, page: Page) -> Iterator[list[float]]:
    """Fill a list with the CPU time of the tasks of a page's main thread in the block, in ms."""
    tasks: list[float] = []
    browser.start_tracing(page=page, categories=CATEGORIES)
    yield tasks
    events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == MAIN_THREAD
    }
    tasks += [
        event.get("tdur", 0) / 1000  # tasks of some microseconds have none
        for event in events
        if event["name"] == "RunTask" and (event["pid"], event["tid"]) in threads
    ]
    assert len(tasks) > TASKS_MIN


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arrives", ["in pieces", "at once"])
def test_no_frame_of_a_growing_answer_takes_long(
    http: RunningGateway, chromium: Browser, shape: str, arrives: str
) -> None:
    text = long_text(shape)
    width = PIECE if arrives == "in pieces" else len(text)
    pieces = [text[at : at + width] for at in range(0, len(text), width)]
    longest: list[float] = []
    while needs_another_run(longest):
        with pages(chromium) as open_page:
            page = open_page(http, viewport_size=WIDE)
            show_answer(page, WARM_UP)
            expect(page.locator("#messages .hljs-number")).to_have_count(1)
            with traced_tasks(chromium, page) as tasks:
                show_answer(page, *pieces, "")
            longest.append(max(tasks))
    assert min(longest) < FRAME_MS_MAX, longest


@pytest.mark.timeout(400)
def test_no_frame_of_a_long_answer_of_a_daemon_takes_long(
    http: RunningGateway, chromium: Browser
) -> None:
    text = long_text("mixed", CHARACTERS // 4).strip()
    longest: list[float] = []
    while needs_another_run(longest):
        with pages(chromium) as open_page:
            page = open_page(http, viewport_size=WIDE)
            choose(page, "echo")
            ask(page, WARM_UP)
            page.fill("#prompt", text)
            with traced_tasks(chromium, page) as tasks:
                page.press("#prompt", "Enter")  # echo answers with some thousand tokens in a second
                branches = page.get_by_role("button", name="Branch from here")
                expect(branches).to_have_count(2, timeout=ANSWER_MS_MAX)
            longest.append(max(tasks))
            assert page.locator(".message.assistant h4").count() == text.count("## ")
    assert min(longest) < FRAME_MS_MAX, longest
