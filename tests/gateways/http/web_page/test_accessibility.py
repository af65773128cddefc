"""The web page by keyboard, by the names of its controls, by its colors, and in a narrow window."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from playwright.sync_api import CDPSession, Page, ViewportSize, expect

from inferd.gateways.http.callers import new_key
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.gateways.http.web_page.contrast import focus_contrast, texts_of
from tests.gateways.http.web_page.driver import (
    UNKNOWN_KEY,
    WIDE,
    PageOpener,
    ask,
    choose,
    enter_key,
    send,
)

CONFIG = (
    echo_model("echo")
    + echo_model("other")
    + echo_model("slow", step_ms=40)
    + echo_model("too-big", weight_bytes=10**15)
)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
TEXT = "A `word` and **more**\n- of it\n\n```\ncode\n```"
STOPS_MAX = 100
MARK_CONTRAST = 3.0
"""The least contrast of a focused control's mark, by WCAG 2.2."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A file of keys, and the key of an operator, whose page has all controls."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    key, entry = new_key("olga")
    file.write_text(f"{entry}operator = true\n")
    return file, key


@pytest.fixture(scope="module")
def operated(daemon: RunningDaemon, keys: tuple[Path, str]) -> Iterator[RunningGateway]:
    with gateway(daemon, "--keys", str(keys[0])) as running:
        yield running


@pytest.fixture
def full_page(
    operated: RunningGateway, keys: tuple[Path, str], open_page: PageOpener
) -> tuple[Page, str]:
    """A page that asks for a key, and the key."""
    open_page.announce(401, 503)
    return open_page(operated, viewport_size=WIDE), keys[1]


class Stop(NamedTuple):
    """A control that has the focus: its accessible name, the part of the page, and its box."""

    name: str
    part: str
    left: float
    top: float
    right: float
    bottom: float

    def precedes(self, other: Stop) -> bool:
        """Return whether *other* is below, further right in the same line, or inside."""
        if other.part != self.part:
            return other.left >= self.left or other.top >= self.bottom
        inside = other.top >= self.top and other.bottom <= self.bottom
        if inside and self.left <= other.left and other.right <= self.right:
            return True
        return other.top >= self.bottom - 1 or (
            other.left >= self.right - 1 and other.bottom > self.top
        )


STOP = """function() {
  if (!this.isConnected) return null;
  const { left, top, right, bottom } = this.getBoundingClientRect();
  return [this.closest("header, nav, main, aside")?.tagName ?? "", left, top, right, bottom];
}"""
CONTROLS = """() => [...document.querySelectorAll(
    "a[href], button, input, select, textarea, summary, [tabindex]")]
  .filter((each) => each.checkVisibility() && !each.disabled && !each.closest("dialog"))
  .map((each) => each.outerHTML)"""
SKIP = "Skip to the message field"


def focused_stop(session: CDPSession) -> Stop:
    """Return the control that has the focus."""
    while True:
        element = session.send("Runtime.evaluate", {"expression": "document.activeElement"})
        handle = {"objectId": element["result"]["objectId"]}
        tree = session.send("Accessibility.getPartialAXTree", {**handle, "fetchRelatives": False})
        function = {"functionDeclaration": STOP, "returnByValue": True}
        found = session.send("Runtime.callFunctionOn", {**handle, **function})["result"]["value"]
        if found is not None:  # else the list around it has been drawn again meanwhile
            return Stop(tree["nodes"][0].get("name", {}).get("value", ""), *found)


def press_tab(page: Page) -> list[Stop]:
    """Press Tab until the focus has been on all controls; check the mark of each."""
    session = page.context.new_cdp_session(page)
    stops: list[Stop] = []
    for _ in range(STOPS_MAX):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            continue  # between the last control and the first
        stop = focused_stop(session)
        if stops and stop[:2] == stops[0][:2]:
            return stops
        stops.append(stop)
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            assert focus_contrast(page) >= MARK_CONTRAST, (scheme, stop)
    raise AssertionError(stops)


def test_tab_goes_through_all_controls_in_their_order(full_page: tuple[Page, str]) -> None:
    page, key = full_page
    page.set_viewport_size(ViewportSize(width=1300, height=1600))  # nothing scrolls meanwhile
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    choose(page, "echo")
    ask(page, TEXT)
    expect(page.get_by_role("button", name="Swap echo", exact=True)).to_be_enabled()
    expect(page.get_by_role("img", name="Tokens per second")).to_be_visible()
    page.locator("#chat-list .delete").wait_for()
    page.click("#options summary")
    found = press_tab(page)
    names = [stop.name for stop in found]
    assert [stop for stop in found if not stop.name] == []
    first = names.index(SKIP)
    stops, names = found[first:] + found[:first], names[first:] + names[:first]
    for before, after in pairwise(stops):
        assert before.precedes(after), (before, after)
    parts = [stop.part for stop in stops]
    assert list(dict.fromkeys(parts)) == ["", "HEADER", "NAV", "MAIN", "ASIDE"]
    controls = page.evaluate(CONTROLS)
    assert len(stops) == len(controls), (names, controls)
    controls_of_chat = ("Messages", "Edit", "Copy code", "Code", "Copy", "Message")
    places = [names.index(name) for name in controls_of_chat]
    assert places == sorted(places)


def test_the_page_is_used_with_the_keyboard_alone(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    choose(page, "echo")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("by keys")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Branch from here")).to_have_count(1)
    page.locator("#prompt").focus()
    names: list[str] = []
    while "New chat" not in names:
        assert len(names) < STOPS_MAX, names
        page.keyboard.press("Shift+Tab")
        names.append(page.evaluate("document.activeElement.textContent.trim()"))
    assert {"Copy", "Branch from here", "Edit"} <= set(names)


def test_all_texts_have_contrast(full_page: tuple[Page, str]) -> None:
    page, key = full_page
    seen: set[str] = set()

    def check() -> None:
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            texts = texts_of(page)
            assert [text for text in texts if text.ratio < text.needed] == [], scheme
            seen.update(text.text for text in texts)

    enter_key(page, "sk-wrong")
    expect(page.locator("#key-failure")).not_to_be_empty()
    check()
    enter_key(page, key)
    expect(page.locator(".welcome")).to_be_visible()
    choose(page, "echo")
    page.click("#options summary")
    page.fill("#system", "Be brief.")
    check()
    ask(page, TEXT)
    page.get_by_role("button", name="Load too-big").click()
    expect(page.locator("#failure")).not_to_be_empty()
    expect(page.locator("#models .state.failed")).to_be_visible()
    page.locator(".skip").focus()
    check()
    page.get_by_role("button", name="Edit").click()
    check()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New chat").click()
    choose(page, "slow")
    send(page, "word " * 100)
    expect(page.locator("#queue li.own")).to_be_visible()
    check()
    page.click("#stop")
    expect(page.locator(".cut")).to_be_visible()
    page.get_by_role("button", name="Rename").click()
    page.fill("#schema", "{")
    check()
    page.locator("#chat-list .delete").first.click()
    expect(page.locator("#deletions button")).to_be_visible()
    check()
    expected = {"Connected", UNKNOWN_KEY}
    expected |= {"Continue", "Regenerate", "Undo", "you", "Keep", "This answer is not complete."}
    expected |= {"Search chats", "Answering…"}
    assert any(text.startswith("Deleted in ") for text in seen)
    expected |= {"Write a message", "default", "word", "more", "code", "of it", "Be brief."}
    expected |= {"You", "Answer", "System prompt", "loaded", "failed", "unloaded", "Send again"}
    expected |= {SKIP, "Try again", "Nothing is waiting.", "Stop", "×"}
    assert expected <= seen, expected - seen


def test_a_narrow_page_has_all_of_it_without_scrolling_sideways(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http, viewport_size=ViewportSize(width=360, height=740))
    choose(page, "echo")
    ask(page, "a" * 300)
    for name in ("Chats", "Activity"):
        page.get_by_role("button", name=name, exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        expect(page.get_by_role("button", name=name, exact=True)).to_have_attribute(
            "aria-expanded", "true"
        )
        texts: list[Any] = texts_of(page)
        assert [text for text in texts if text.ratio < text.needed] == []
        page.get_by_role("button", name=name, exact=True).click()
    expect(page.locator("#details")).to_be_hidden()
    expect(page.locator("#chats")).to_be_hidden()
