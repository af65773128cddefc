"""Answers that are cut, followed and continued on the page: kills, reloads, and other tabs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.gateways.http.web_page.driver import (
    NETWORK_ERROR,
    PageOpener,
    ask,
    choose,
    pages,
    send,
)

CONFIG = echo_model("echo") + echo_model("slow", step_ms=50)
OPTIONS = ()
TEXT = " ".join(f"word{number}" for number in range(12))
LONG = " ".join(f"word{number}" for number in range(400))
MARKED_S_MAX = 10.0
"""Earlier pages showed a finished answer for 29 s. The daemon's end is noticed within about 1 s."""


@pytest.fixture
def own(chromium: Browser) -> Iterator[tuple[RunningDaemon, RunningGateway, PageOpener]]:
    """A daemon and a gateway to be killed, and an opener of pages."""
    with running_daemon(CONFIG) as daemon, pages(chromium) as opener, gateway(daemon) as running:
        opener.announce(NETWORK_ERROR, 503, 404, 409)
        yield daemon, running, opener


def body(page: Page) -> Locator:
    return page.locator(".message.assistant .body").last


def begin(page: Page, text: str) -> None:
    """Send a message, and wait until a part of its answer is shown."""
    choose(page, "slow")
    send(page, text)
    expect(body(page)).to_contain_text("word2")


def open_again(opener: PageOpener, running: RunningGateway, page: Page) -> Page:
    return opener(running, f"/#{page.url.partition('#')[2]}")


def test_a_daemon_that_is_killed_marks_the_answer_at_once_and_continue_takes_the_rest(
    own: tuple[RunningDaemon, RunningGateway, PageOpener],
) -> None:
    daemon, running, opener = own
    page = opener(running)
    begin(page, TEXT)
    daemon.kill()
    killed_at = time.monotonic()
    cut = page.locator(".message.assistant .cut")
    expect(cut).to_contain_text("This answer was cut: ")
    assert time.monotonic() - killed_at < MARKED_S_MAX
    assert not re.search(r"resume\(|set_input|docs/", cut.inner_text()), "a hint for programs"
    for name in ("Continue", "Regenerate", "Edit the question", "Branch from here"):
        expect(cut.get_by_role("button", name=name)).to_be_visible()
    expect(page.locator("#send")).to_be_visible()
    assert TEXT not in body(page).inner_text()
    daemon.start_again()
    cut.get_by_role("button", name="Continue").click()
    expect(body(page)).to_have_text(TEXT)
    expect(cut).to_have_count(0)
    expect(page.locator(".message")).to_have_count(2)
    page.reload()
    expect(body(page)).to_have_text(TEXT)
    expect(cut).to_have_count(0)


def test_a_gateway_that_is_killed_marks_the_answer_and_the_next_one_continues_it(
    own: tuple[RunningDaemon, RunningGateway, PageOpener],
) -> None:
    daemon, running, opener = own
    page = opener(running)
    begin(page, TEXT)
    running.process.kill()
    running.process.wait()
    cut = page.locator(".message.assistant .cut")
    expect(cut).to_contain_text("connection to the gateway was lost")
    with gateway(daemon, listen=running.address):
        expect(page.locator("#connection")).to_have_text("Connected")
        cut.get_by_role("button", name="Continue").click()
        expect(body(page)).to_have_text(TEXT)
        expect(cut).to_have_count(0)
        page.close()


def test_a_stopped_answer_is_continued(http: RunningGateway, open_page: PageOpener) -> None:
    page = open_page(http)
    begin(page, TEXT)
    page.click("#stop")
    cut = page.locator(".message.assistant .cut")
    expect(cut).to_contain_text("not complete")
    assert TEXT not in body(page).inner_text()
    cut.get_by_role("button", name="Continue").click()
    expect(body(page)).to_have_text(TEXT)
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
    expect(cut).to_have_count(0)


def test_an_answer_is_regenerated(http: RunningGateway, open_page: PageOpener) -> None:
    page = open_page(http)
    choose(page, "echo")
    ask(page, "first")
    ask(page, "second")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#progress")).to_contain_text("tokens in")
    expect(page.locator(".message.user .body")).to_have_text(["first", "second"])
    expect(page.locator(".message.assistant .body")).to_have_text(["first", "second"])
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)


def test_a_cut_answer_is_regenerated_edited_and_branched(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    begin(page, LONG)
    page.click("#stop")
    cut = page.locator(".message.assistant .cut")
    expect(cut).to_be_visible()
    chat = page.url.partition("#")[2]
    cut.get_by_role("button", name="Branch from here").click()
    expect(page.locator("#progress")).to_contain_text("This is a branch")
    expect(body(page)).to_contain_text("word2")
    page.locator(f'[data-name="open {chat}"]').click()
    cut.get_by_role("button", name="Edit the question").click()
    field = page.get_by_label("Edited message")
    expect(field).to_have_value(LONG)
    field.fill("short")
    field.press("Enter")
    expect(body(page)).to_have_text("short")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator("#send")).to_be_visible()
    begin(page, LONG)
    page.click("#stop")
    cut.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#stop")).to_be_visible()
    expect(body(page)).to_contain_text("word5")
    expect(page.locator(".message.user .body")).to_have_text(["short", LONG])
    page.click("#stop")
    expect(cut).to_be_visible()


def test_a_reload_picks_the_answer_up_where_it_is(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    begin(page, TEXT)
    page.reload()
    expect(body(page)).to_have_text(TEXT)
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".cut")).to_have_count(0)


def test_an_answer_that_was_stopped_does_not_go_on_after_a_reload(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    begin(page, TEXT)
    page.click("#stop")
    expect(page.locator(".cut")).to_be_visible()
    kept = body(page).inner_text()
    page.reload()
    expect(page.locator(".cut")).to_be_visible()
    expect(page.locator("#stop")).to_be_hidden()
    assert body(page).inner_text() == kept


def test_a_chat_that_is_left_and_opened_again_goes_on(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    begin(page, TEXT)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".welcome")).to_be_visible()
    page.locator("#chat-list .open").first.click()
    expect(body(page)).to_have_text(TEXT)
    expect(page.locator("#send")).to_be_visible()


def test_a_second_tab_shows_the_answer_while_it_arrives_and_stops_it(
    http: RunningGateway, open_page: PageOpener
) -> None:
    first = open_page(http)
    begin(first, LONG)
    second = open_again(open_page, http, first)
    expect(second.locator("#stop")).to_be_visible()
    expect(body(second)).to_contain_text("word5")
    second.click("#stop")
    for page in (first, second):
        expect(page.locator(".cut")).to_be_visible()
        expect(page.locator("#send")).to_be_visible()
    send(first, TEXT)
    expect(second.locator(".message.assistant")).to_have_count(2)  # without a reload
    for page in (first, second):
        expect(body(page)).to_have_text(TEXT)
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator(".message")).to_have_count(4)
        expect(page.locator(".cut")).to_have_count(0)


def test_a_tab_that_is_closed_leaves_the_answer_to_the_other(
    http: RunningGateway, open_page: PageOpener
) -> None:
    first = open_page(http)
    begin(first, LONG)
    second = open_again(open_page, http, first)
    expect(second.locator("#stop")).to_be_visible()
    shown = body(second)
    first.close()
    words = len(shown.inner_text().split())
    expect(shown).to_contain_text(f"word{words + 5} ")
    expect(second.locator(".cut")).to_have_count(0)
    second.click("#stop")
    expect(second.locator(".cut")).to_be_visible()


def test_a_message_that_never_arrived_is_put_back(
    own: tuple[RunningDaemon, RunningGateway, PageOpener],
) -> None:
    daemon, running, opener = own
    page = opener(running)
    choose(page, "slow")
    ask(page, "hi")
    running.process.kill()
    running.process.wait()
    send(page, "are you there")
    expect(page.locator("#failure")).to_contain_text("the gateway does not answer")
    expect(page.locator("#prompt")).to_have_value("are you there")
    with gateway(daemon, listen=running.address):
        page.locator("#failure").get_by_role("button", name="Try again").click()
        expect(body(page)).to_have_text("are you there")
        expect(page.locator("#prompt")).to_have_value("")
        page.close()


def test_a_chat_that_another_program_answers_is_shown_when_it_has_ended(
    http: RunningGateway, open_page: PageOpener, client: Client
) -> None:
    open_page.announce(409, 400, 404, 503)
    page = open_page(http)
    choose(page, "slow")
    ask(page, "hi")
    chat = page.url.partition("#")[2]
    with client.session("slow", session_id=chat) as session:
        session.chat(TEXT)
    expect(body(page)).to_have_text(TEXT)
