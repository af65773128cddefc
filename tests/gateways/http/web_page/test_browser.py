"""The web page in headless Chromium, on a daemon with echo models."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from inferd import Client
from inferd.gateways.http.callers import new_key
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.gateways.http.web_page.driver import (
    NETWORK_ERROR,
    WIDE,
    PageOpener,
    ask,
    choose,
    enter_key,
    pages,
    send,
    shown_model,
)
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

CONFIG = (
    echo_model("echo")
    + echo_model("slow", step_ms=40)
    + echo_model("single", step_ms=20, slots=1)
    + echo_model("later", load_ms=300)
)
OPTIONS = ()
"""The gateway holds headers as briefly as it does by default."""


def answers(page: Page) -> list[str]:
    return page.locator(".message.assistant .body").all_inner_texts()


def test_an_answer_grows_and_ends(http: RunningGateway, open_page: PageOpener) -> None:
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


def test_the_usage_of_the_models_is_shown_once_a_turn_has_ended(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    choose(page, "slow")
    send(page, "one two three four five six seven eight nine ten")
    shown = page.locator("#usage li", has_text="slow")
    expect(shown).to_contain_text("turns")
    expect(shown).to_contain_text("generated")


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_turn_and_keeps_what_was_answered(
    http: RunningGateway, open_page: PageOpener, how: str
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


def test_the_reasoning_of_an_answer_is_ended(http: RunningGateway, open_page: PageOpener) -> None:
    page = open_page(http)
    choose(page, "slow")
    send(page, "<think>" + "thought " * 60 + "</think>" + "answer " * 10)
    expect(page.locator(".reasoning")).to_contain_text("thought thought")
    page.click("#answer-now")
    expect(page.locator("#answer-now")).to_be_hidden()
    thought = page.locator(".message.assistant .reasoning").inner_text()
    assert thought.startswith("thought") and len(thought) < 400
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()


def test_a_message_is_edited_and_sent_again(http: RunningGateway, open_page: PageOpener) -> None:
    page = open_page(http)
    choose(page, "echo")
    ask(page, "first")
    ask(page, "second")
    page.get_by_role("button", name="Edit").nth(1).click()
    page.get_by_label("Edited message").fill("changed")
    page.get_by_label("Edited message").press("Enter")
    expect(page.locator(".message.user .body")).to_have_text(["first", "changed"])
    expect(page.locator(".message.assistant .body")).to_have_text(["first", "changed"])


def test_a_branch_leaves_the_other_chat_as_it_is(
    http: RunningGateway, open_page: PageOpener
) -> None:
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
    http: RunningGateway, open_page: PageOpener
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
    http: RunningGateway, open_page: PageOpener, client: Client
) -> None:
    page = open_page(http, viewport_size=WIDE)
    choose(page, "single")
    with client.session("single", priority="high") as session, ThreadPoolExecutor() as threads:
        threads.submit(session.chat, "x" * 1500)
        wait_until(lambda: [task["state"] for task in client.queue()] == ["running"])
        send(page, "mine")
        expect(page.locator("#progress")).to_contain_text("place 1 of 1")
        expect(page.locator("#queue li.own")).to_contain_text("This chat: place 1")
        answering = re.compile(r"prompt (\d+) of \1 tokens, answer [1-9]")
        expect(page.locator("#queue li").first).to_contain_text(answering)
        session.cancel()
        expect(page.locator(".message.assistant .body")).to_have_text("mine")


def test_answers_are_shown_as_text(http: RunningGateway, open_page: PageOpener) -> None:
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


def test_a_parameter_out_of_its_range_is_not_sent(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    choose(page, "echo")
    page.click("#options summary")
    page.fill("#top-p", "7")
    send(page, "text")
    expect(page.locator("#prompt")).to_have_value("text")
    assert page.locator(".message").count() == 0


def test_a_chat_that_another_program_answers_is_busy(
    http: RunningGateway, open_page: PageOpener, client: Client
) -> None:
    open_page.announce(409)
    page = open_page(http)
    choose(page, "slow")
    ask(page, "hi")
    chat = page.url.partition("#")[2]
    with client.session("slow", session_id=chat) as session, ThreadPoolExecutor() as threads:
        with page.expect_response(lambda response: response.url.endswith(f"{chat}/events")):
            threads.submit(session.chat, "word " * 100)
        expect(page.locator(".message.assistant .body").nth(1)).to_contain_text("word word")
        expect(page.locator("#send")).to_be_visible()
        send(page, "me too")
        expect(page.locator("#failure")).to_contain_text("session")
        expect(page.locator("#prompt")).to_have_value("me too")
        session.cancel()


def test_an_edit_under_way_stays_while_another_tab_is_answered(
    http: RunningGateway, open_page: PageOpener
) -> None:
    first = open_page(http)
    choose(first, "slow")
    ask(first, "hi")
    send(first, "word " * 200)
    second = open_page(http, f"/#{first.url.partition('#')[2]}")
    second.get_by_role("button", name="Edit").first.click()
    second.get_by_label("Edited message").fill("half of a")
    expect(second.locator(".message.assistant .body").nth(1)).to_contain_text("word " * 20)
    first.click("#stop")
    expect(second.locator(".cut")).to_be_visible()
    expect(second.get_by_label("Edited message")).to_have_value("half of a")
    expect(second.get_by_label("Edited message")).to_be_focused()


def test_the_focus_stays_in_the_list_of_chats_while_it_changes(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    choose(page, "slow")
    ask(page, "stay here")
    send(page, "word word")
    chat = page.get_by_role("button", name="stay here", exact=True)
    with page.expect_response(lambda response: "/sessions?" in response.url):
        chat.focus()
    expect(page.locator("#progress")).to_contain_text("tokens in")
    expect(chat).to_be_focused()
    page.get_by_role("button", name="Delete stay here").click()
    expect(page.locator("#prompt")).to_be_focused()


def test_operators_load_swap_and_unload_models(
    daemon: RunningDaemon, open_page: PageOpener, client: Client, tmp_path: Path
) -> None:
    open_page.announce(503)
    key, entry = new_key("olga")
    file = tmp_path / "keys.toml"
    file.write_text(f"{entry}operator = true\n")
    with gateway(daemon, "--keys", str(file)) as running:
        open_page.announce(401)
        page = open_page(running, viewport_size=WIDE)
        enter_key(page, key)
        models = page.locator("#models")
        page.get_by_role("button", name="Load later").click()
        expect(page.get_by_role("progressbar", name="Loading later")).to_be_visible()
        other = page.get_by_label("Model to answer instead of later")
        other.select_option("slow")
        client.load_by_name("single")
        expect(page.get_by_role("button", name="Unload single")).to_be_visible()
        expect(other).to_have_value("slow")
        page.get_by_role("button", name="Swap later").click()
        expect(models).to_contain_text("answers with slow")
        page.get_by_role("button", name="Undo swap later").click()
        undone = page.get_by_role("button", name="Swap later", exact=True)
        again = page.get_by_role("button", name="Try again")
        expect(undone.or_(again)).to_be_visible()
        while again.is_visible():  # the old model of the swap is still being unloaded
            again.click()
            expect(undone.or_(again)).to_be_visible()
        expect(models).not_to_contain_text("answers with")
        page.get_by_role("button", name="Unload later").click()
        expect(shown_model(page, "later").locator(".state")).to_have_text("unloaded")
        expect(page.get_by_role("button", name="Load later")).to_be_enabled()
        page.close()
    states = {model["name"]: model["state"] for model in client.models()}
    assert states["later"] == "cold"


def test_the_page_connects_again_after_restarts(chromium: Browser) -> None:
    with running_daemon(CONFIG) as own, pages(chromium) as open_page:
        open_page.announce(NETWORK_ERROR, 503)
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


def test_a_page_that_is_opened_without_a_daemon_says_so(chromium: Browser) -> None:
    with running_daemon(CONFIG) as own, pages(chromium) as open_page, gateway(own) as running:
        own.kill()
        open_page.announce(NETWORK_ERROR, 503)
        page = open_page(running)
        connection = page.locator("#connection")
        expect(connection).to_have_text("The daemon is away")
        own.start_again()
        expect(connection).to_have_text("Connected")


def test_an_error_in_the_console_fails_a_test_unless_it_was_announced(
    http: RunningGateway, chromium: Browser
) -> None:
    for text in ("a surprise", "an expected error"):
        with pages(chromium) as open_page:
            open_page.announce("expected")
            page = open_page(http)
            with page.expect_console_message():
                page.evaluate("text => console.error(text)", text)
            found, open_page.errors = open_page.errors, []
        assert [text for text in found if "surprise" in text] == found
        assert len(found) == (text == "a surprise")


@pytest.mark.model
def test_a_full_chat_goes_on_and_shows_which_messages_are_no_longer_read(
    open_page: PageOpener, tmp_path: Path
) -> None:
    model = f"[models.tiny]\nfile = '{write_tiny('llama', tmp_path)}'\n"
    limits = "ctx-size = 320\nn-predict = 40\ntemp = 0\nignore-eos = true\n"
    with running_daemon(model + limits) as daemon, gateway(daemon) as http:
        page = open_page(http)
        choose(page, "tiny")
        for number in range(5):
            ask(page, f"question {number} about the sea and its fish")
        expect(page.locator(".message")).to_have_count(10)
        old = page.locator(".message.dropped")
        assert old.count() in (2, 4, 6)
        expect(page.locator(".message .full")).to_have_count(1)
        expect(old.last).to_contain_text("it no longer reads the messages above")
        page.reload()
        expect(page.locator(".message")).to_have_count(10)
        expect(page.locator(".message .full")).to_be_visible()
        page.close()
