"""The web page in headless Chromium, on a daemon with echo models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from inferd import Client
from inferd.gateways.http.callers.keys import new_key
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.waiting import wait_until
from tools.get_browser import MISSING, browser

CONFIG = (
    echo_model("echo")
    + echo_model("slow", step_ms=40)
    + echo_model("single", step_ms=20, slots=1)
    + echo_model("later", load_ms=300)
    + echo_model("too-big", weight_bytes=10**15)
)
OPTIONS = ()
"""The gateway holds headers as briefly as it does by default."""
WAIT_MS = 20_000
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    path = browser()
    assert path is not None, MISSING
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@contextmanager
def pages(chromium: Browser) -> Iterator[Open]:
    """Yield a function that opens the page of a gateway in a browser of its own.

    At the end no page has had an error, has broken its policy, or has sent a request elsewhere.
    """
    errors: list[str] = []
    with chromium.new_context() as context:
        context.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)

        def note_line(line: ConsoleMessage) -> None:
            if "Content Security Policy" in line.text:
                errors.append(line.text)

        def note_request(running: RunningGateway, request: Request) -> None:
            if not request.url.startswith(running.url):
                errors.append(request.url)

        def open_page(running: RunningGateway, path: str = "/", **options: Any) -> Page:
            page = context.new_page()
            if options:
                page.set_viewport_size(options["viewport_size"])
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", note_line)
            page.on("request", lambda request: note_request(running, request))
            page.goto(running.url + path)
            return page

        yield open_page
    assert errors == []


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Open]:
    with pages(chromium) as open_page:
        yield open_page


def choose(page: Page, model: str) -> None:
    expect(page.locator(f"#model option:text-is('{model}')")).to_have_count(1)
    page.select_option("#model", model)


def send(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answers(page: Page) -> list[str]:
    return page.locator(".message.assistant .body").all_inner_texts()


def ask(page: Page, text: str) -> None:
    """Send a message, and wait until its answer is complete and stored."""
    count = page.locator(".message.assistant").count()
    send(page, text)
    expect(page.locator(".message.assistant")).to_have_count(count + 1)
    expect(page.locator("#send")).to_be_visible()
    expect(page.get_by_role("button", name="Branch from here")).to_have_count(count + 1)


def test_an_answer_grows_and_ends(http: RunningGateway, open_page: Open) -> None:
    page = open_page(http)
    choose(page, "slow")
    send(page, "one two three four five six")
    body = page.locator(".message.assistant .body")
    expect(body).to_contain_text("one t")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#messages")).to_have_attribute("aria-busy", "true")
    expect(body).to_have_text("one two three four five six")
    expect(page.locator("#progress")).to_contain_text("tokens in")
    assert page.locator("#messages").get_attribute("aria-busy") is None


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_turn_and_keeps_what_was_answered(
    http: RunningGateway, open_page: Open, how: str
) -> None:
    page = open_page(http)
    choose(page, "slow")
    send(page, "word " * 200)
    expect(page.locator(".message.assistant .body")).to_contain_text("word word")
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#progress")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Branch from here")).to_have_count(1)
    [kept] = answers(page)
    assert kept.startswith("word") and len(kept) < 900


def test_a_message_is_edited_and_sent_again(http: RunningGateway, open_page: Open) -> None:
    page = open_page(http)
    choose(page, "echo")
    ask(page, "first")
    ask(page, "second")
    page.get_by_role("button", name="Edit").nth(1).click()
    page.get_by_label("Edited message").fill("changed")
    page.get_by_label("Edited message").press("Enter")
    expect(page.locator(".message.user .body")).to_have_text(["first", "changed"])
    expect(page.locator(".message.assistant .body")).to_have_text(["first", "changed"])


def test_a_branch_leaves_the_other_chat_as_it_is(http: RunningGateway, open_page: Open) -> None:
    page = open_page(http)
    choose(page, "echo")
    ask(page, "alpha")
    ask(page, "beta")
    page.get_by_role("button", name="Branch from here").first.click()
    expect(page.locator(".message.user .body")).to_have_text(["alpha"])
    ask(page, "gamma")
    page.get_by_role("button", name="alpha", exact=True).click()
    expect(page.locator(".message.user .body")).to_have_text(["alpha", "beta"])
    page.get_by_role("button", name="alpha (branch)", exact=True).click()
    expect(page.locator(".message.user .body")).to_have_text(["alpha", "gamma"])


def test_a_chat_is_kept_over_a_reload_and_can_be_deleted(
    http: RunningGateway, open_page: Open
) -> None:
    page = open_page(http)
    choose(page, "echo")
    ask(page, "remember me")
    page.reload()
    expect(page.locator(".message.user .body")).to_have_text(["remember me"])
    page.get_by_role("button", name="Delete remember me").click()
    expect(page.locator(".welcome")).to_be_visible()
    expect(page.get_by_role("button", name="remember me", exact=True)).to_have_count(0)


def test_the_place_in_the_queue_is_shown_while_the_turn_waits(
    http: RunningGateway, open_page: Open, client: Client
) -> None:
    page = open_page(http, viewport_size={"width": 1300, "height": 800})
    choose(page, "single")
    with client.session("single", priority="high") as session, ThreadPoolExecutor() as threads:
        threads.submit(session.chat, "x" * 1500)
        wait_until(lambda: [task["state"] for task in client.queue()] == ["running"])
        send(page, "mine")
        expect(page.locator("#progress")).to_contain_text("place 1 of 1")
        expect(page.locator("#queue li.own")).to_contain_text("This chat: place 1")
        session.cancel()
        expect(page.locator(".message.assistant .body")).to_have_text("mine")


def test_answers_are_shown_as_text(http: RunningGateway, open_page: Open) -> None:
    page = open_page(http)
    choose(page, "echo")
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    page.fill("#prompt", f"{attack}\n\n- `code`\n- **bold**\n\n```\n{attack}\n```")
    page.press("#prompt", "Enter")
    body = page.locator(".message.assistant .body")
    expect(body.locator("pre code")).to_have_text(attack)
    expect(body.locator("p").first).to_have_text(attack)
    expect(body.locator("li code")).to_have_text("code")
    expect(body.locator("li strong")).to_have_text("bold")
    assert page.locator("#messages img, #messages script").count() == 0


def test_a_failure_is_shown_with_its_hint(http: RunningGateway, open_page: Open) -> None:
    page = open_page(http)
    choose(page, "too-big")
    send(page, "text")
    alert = page.locator("#failure[role=alert]")
    expect(alert).to_contain_text("memory")
    expect(alert.get_by_role("button", name="Try again")).to_be_visible()
    expect(page.locator("#prompt")).to_have_value("text")


def test_a_parameter_out_of_its_range_is_not_sent(http: RunningGateway, open_page: Open) -> None:
    page = open_page(http)
    choose(page, "echo")
    page.click("#options summary")
    page.fill("#top-p", "7")
    send(page, "text")
    expect(page.locator("#prompt")).to_have_value("text")
    assert page.locator(".message").count() == 0


def test_a_chat_that_is_answered_in_another_tab_is_busy(
    http: RunningGateway, open_page: Open
) -> None:
    first = open_page(http)
    choose(first, "slow")
    ask(first, "hi")
    second = open_page(http, f"/#{first.url.partition('#')[2]}")
    expect(second.locator(".message.user")).to_have_count(1)
    send(first, "word " * 100)
    expect(first.locator(".message.assistant .body").nth(1)).to_contain_text("word word")
    send(second, "me too")
    expect(second.locator("#failure")).to_contain_text("session")
    first.click("#stop")


def test_the_page_is_used_with_the_keyboard_alone(http: RunningGateway, open_page: Open) -> None:
    page = open_page(http)
    choose(page, "echo")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("by keys")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Branch from here")).to_have_count(1)
    page.locator("#prompt").focus()
    names: list[str] = []
    while "New chat" not in names:
        assert len(names) < 100, names
        page.keyboard.press("Shift+Tab")
        names.append(page.evaluate("document.activeElement.textContent.trim()"))
    assert {"Copy", "Branch from here", "Edit"} <= set(names)


def test_controls_have_names(http: RunningGateway, open_page: Open) -> None:
    page = open_page(http)
    expect(page.locator("#model option").first).to_be_attached()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, [role=img]")]
        .filter((each) => !(each.labels?.length || each.textContent.trim()
            || each.getAttribute("aria-label")))
        .map((each) => each.outerHTML)"""
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(http: RunningGateway, open_page: Open, scheme: Any) -> None:
    page = open_page(http, viewport_size={"width": 1300, "height": 800})
    page.emulate_media(color_scheme=scheme)
    choose(page, "echo")
    ask(page, "contrast")
    for selector in ("#connection", ".message .author", ".message.user .body", "#send", ".open"):
        colors = page.eval_on_selector(selector, COLORS)
        assert contrast(*colors) >= 4.5, (selector, colors)


COLORS = """(element) => {
  const text = getComputedStyle(element).color;
  let behind = element;
  while (behind && getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") {
    behind = behind.parentElement;
  }
  return [text, getComputedStyle(behind ?? document.body).backgroundColor];
}"""


def contrast(*colors: str) -> float:
    """Return the ratio of two colors by WCAG 2."""
    shades = []
    for color in colors:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        red, green, blue = (
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        shades.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(shades) + 0.05) / (min(shades) + 0.05)


def test_a_narrow_page_has_all_of_it_without_scrolling_sideways(
    http: RunningGateway, open_page: Open
) -> None:
    page = open_page(http, viewport_size={"width": 360, "height": 740})
    choose(page, "echo")
    ask(page, "a" * 300)
    for name in ("Chats", "Activity"):
        page.get_by_role("button", name=name, exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        expect(page.get_by_role("button", name=name, exact=True)).to_have_attribute(
            "aria-expanded", "true"
        )
        page.get_by_role("button", name=name, exact=True).click()
    expect(page.locator("#details")).to_be_hidden()
    expect(page.locator("#chats")).to_be_hidden()


def test_a_gateway_with_keys_asks_for_one_and_operators_manage_models(
    daemon: RunningDaemon, open_page: Open, tmp_path: Path
) -> None:
    (key, entry), (other, user) = new_key("olga"), new_key("bob")
    file = tmp_path / "keys.toml"
    file.write_text(f"{entry}operator = true\n{user}")
    with gateway(daemon, "--keys", str(file)) as running:
        page = open_page(running, viewport_size={"width": 1300, "height": 800})
        for wrong in ("sk-wrong", other):
            page.locator("#key").fill(wrong)
            page.get_by_role("button", name="Continue").click()
            if wrong == "sk-wrong":
                expect(page.locator("#key-failure")).to_contain_text("key")
        expect(page.locator("#models li")).to_have_count(5)
        assert page.locator("#models button").count() == 0
        stored = page.evaluate("[JSON.stringify(localStorage), document.cookie]")
        assert other not in json.dumps(stored)
        page.get_by_role("button", name="Key", exact=True).click()
        page.locator("#key").fill(key)
        page.get_by_role("button", name="Continue").click()
        page.get_by_role("button", name="Load later").click()
        expect(page.get_by_role("progressbar", name="Loading later")).to_be_visible()
        page.get_by_label("Model to answer instead of later").select_option("echo")
        page.get_by_role("button", name="Swap later").click()
        expect(page.locator("#models")).to_contain_text("answers with echo")
        expect(page.get_by_role("button", name="Undo swap later")).to_be_enabled()


def test_the_page_connects_again_after_restarts(chromium: Browser) -> None:
    with running_daemon(CONFIG) as own, pages(chromium) as open_page:
        with gateway(own) as first:
            page = open_page(first)
            connection = page.locator("#connection")
            expect(connection).to_have_text("Connected")
            own.kill()
            expect(connection).to_have_text("The daemon is away")
            own.start_again()
            expect(connection).to_have_text("Connected")
            address = first.address
        expect(connection).to_have_class("bad")
        with gateway(own, listen=address):
            expect(connection).to_have_text("Connected")
            choose(page, "echo")
            ask(page, "still here")
