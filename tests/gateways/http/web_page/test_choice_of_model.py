"""The model that the page selects, and its words if there is none; its storage in the browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from inferd import Client
from inferd.testing import running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.gateways.http.web_page.driver import WIDE, PageOpener, ask, pages, send
from tests.tiny_gguf import write_tiny

CONFIG = "\n".join(f"[models.{name}]\nfile = {json.dumps(__file__)}" for name in ("ada", "bob"))
"""Files that are not models; they are offered until a load has failed."""
OPTIONS = ()
FILL_STORAGE = """() => {
  for (let size = 1 << 24; size; size >>= 1) {
    for (let i = 0; ; i += 1) {
      try { localStorage.setItem(`full-${size}-${i}`, "x".repeat(size)); }
      catch { break; }
    }
  }
}"""


def options(page: Page) -> list[str]:
    return page.locator("#model option").all_inner_texts()


def test_the_page_offers_no_test_model_beside_others(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http, viewport_size=WIDE)
    expect(page.locator("#connection")).to_have_text("Connected")
    assert options(page) == ["ada", "bob"]
    expect(page.locator("#models .name")).to_have_count(2)
    expect(page.locator("#no-model")).to_be_hidden()


def test_the_model_used_last_is_selected_again(http: RunningGateway, open_page: PageOpener) -> None:
    page = open_page(http)
    expect(page.locator("#model")).to_have_value("ada")
    page.select_option("#model", "bob")
    page.close()
    expect(open_page(http).locator("#model")).to_have_value("bob")


def test_a_chat_with_a_test_model_is_continued_with_it(
    http: RunningGateway, open_page: PageOpener, client: Client
) -> None:
    with client.session("echo", session_id="chat_tested") as session:
        session.chat("first")
    page = open_page(http, "/#chat_tested")
    expect(page.locator("#model")).to_have_value("echo")
    ask(page, "second")
    expect(page.locator(".message.assistant .body")).to_have_text(["first", "second"])
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#model")).to_have_value("ada")
    assert options(page) == ["ada", "bob"]


@pytest.mark.parametrize(
    "damaged", ["{", "null", "5", '"text"', "[1]", '{"model": {"a": 1}, "system": [2]}', ""]
)
def test_a_damaged_entry_of_the_storage_is_dropped(
    http: RunningGateway, open_page: PageOpener, damaged: str
) -> None:
    page = open_page(http)
    for name in ("inferd-names", "inferd-choices"):
        page.evaluate("entry => localStorage.setItem(...entry)", [name, damaged])
    page.reload()
    expect(page.locator("#model")).to_have_value("ada")
    assert page.locator("#system").input_value() == ""
    page.select_option("#model", "bob")
    page.reload()
    expect(page.locator("#model")).to_have_value("bob")


@pytest.fixture(scope="module")
def only_echo() -> Iterator[RunningGateway]:
    with running_daemon(echo_model("echo") + echo_model("slow")) as daemon, gateway(daemon) as http:
        yield http


def test_a_chat_begins_while_the_storage_is_full(
    only_echo: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(only_echo)
    page.evaluate(FILL_STORAGE)
    page.reload()
    expect(page.locator("#model")).to_have_value("echo")
    ask(page, "still here")
    expect(page.locator(".message.assistant .body")).to_have_text("still here")


def test_without_a_language_model_the_page_says_how_to_get_one(
    only_echo: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(only_echo)
    expect(page.get_by_text("inferd pull smollm2")).to_be_visible()
    assert options(page) == ["echo", "slow"]
    ask(page, "repeat")
    expect(page.locator(".message.assistant .body")).to_have_text("repeat")


def test_a_model_is_remembered_once_it_is_used_and_not_when_it_is_only_selected_for_the_user(
    only_echo: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(only_echo)
    expect(page.locator("#model")).to_have_value("echo")
    remembered = "JSON.parse(localStorage.getItem('inferd-choices') ?? '{}').model ?? null"
    assert page.evaluate(remembered) is None
    ask(page, "hello")
    assert page.evaluate(remembered) == "echo"


@pytest.mark.model
def test_a_new_user_is_answered_by_a_model_that_has_weights(
    chromium: Browser, tmp_path: Path
) -> None:
    models = f"[models.tiny]\nfile = '{write_tiny('llama', tmp_path)}'\nn-predict = 4\n"
    with running_daemon(models) as daemon, gateway(daemon) as http, pages(chromium) as open_page:
        page = open_page(http)
        expect(page.locator("#model")).to_have_value("tiny")
        send(page, "What is your name?")
        expect(page.locator("#progress")).to_contain_text("tokens in")
        assert page.locator(".message.assistant .body").inner_text() != "What is your name?"
        page.close()
