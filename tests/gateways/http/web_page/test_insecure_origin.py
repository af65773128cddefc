"""The page at an address that browsers do not trust: without TLS, and not of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from inferd.gateways.http.callers import new_key
from inferd.gateways.http.web_page.api import FILES
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.gateways.http.web_page.driver import (
    LAN_NAME,
    PageOpener,
    ask,
    choose,
    enter_key,
    pages,
)

CONFIG = echo_model("echo")
OPTIONS = ()
GUARDED = {("elements.js", "clipboard")}
"""The uses of names that only secure contexts have; each has another way beside it."""
NAMES = """() => [globalThis, navigator, crypto, document, history].flatMap((each) => {
  const found = [];
  for (let at = each; at; at = Object.getPrototypeOf(at)) {
    found.push(...Object.getOwnPropertyNames(at));
  }
  return found;
})"""


@pytest.fixture
def lan(daemon: RunningDaemon, chromium: Browser) -> Iterator[tuple[RunningGateway, PageOpener]]:
    """A gateway that is called by that name, and an opener of its pages."""
    with gateway(daemon, "--allow-host", LAN_NAME) as running, pages(chromium) as opener:
        running.url = f"http://{LAN_NAME}:{running.port}"
        # This header is for trusted origins; the others, with the policy, are kept.
        opener.announce("Cross-Origin-Opener-Policy header has been ignored")
        yield running, opener


def opened(lan: tuple[RunningGateway, PageOpener]) -> Page:
    page = lan[1](lan[0])
    assert not page.evaluate("isSecureContext")
    return page


def test_a_chat_works_and_the_page_says_that_it_is_not_private(
    lan: tuple[RunningGateway, PageOpener],
) -> None:
    page = opened(lan)
    choose(page, "echo")
    expect(page.get_by_text("This connection is not private").first).to_be_visible()
    ask(page, "one")
    ask(page, "two")
    assert re.fullmatch(r"#chat_[0-9a-f]{20}", page.evaluate("location.hash"))
    page.get_by_role("button", name="Branch from here").first.click()
    expect(page.locator(".message.user .body")).to_have_text(["one"])
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("three")
    page.get_by_label("Edited message").press("Enter")
    expect(page.locator(".message.assistant .body")).to_have_text("three")


def test_an_answer_is_copied(lan: tuple[RunningGateway, PageOpener]) -> None:
    page = opened(lan)
    choose(page, "echo")
    ask(page, "take this")
    copy = page.get_by_role("button", name="Copy")
    copy.click()
    expect(page.locator("#progress")).to_have_text("Copied.")
    expect(copy).to_be_focused()
    page.locator("#prompt").focus()
    page.keyboard.press("Control+V")
    expect(page.locator("#prompt")).to_have_value("take this")


def test_code_is_colored_and_copied_and_formulas_are_typeset(
    lan: tuple[RunningGateway, PageOpener],
) -> None:
    page = opened(lan)
    choose(page, "echo")
    ask(page, "$x$\n\n```python\ndef f():\n    pass\n```")
    answer = page.locator(".message.assistant")
    expect(answer.locator("math")).to_have_count(1)
    expect(answer.locator(".hljs-keyword")).to_have_text(["def", "pass"])
    answer.get_by_role("button", name="Copy code").click()
    expect(page.locator("#progress")).to_have_text("Copied.")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+V")
    expect(page.locator("#prompt")).to_have_value("def f():\n    pass")


def test_a_failed_copy_is_shown(lan: tuple[RunningGateway, PageOpener]) -> None:
    page = opened(lan)
    choose(page, "echo")
    ask(page, "text")
    page.evaluate("() => { document.execCommand = () => false; }")
    page.get_by_role("button", name="Copy").click()
    expect(page.locator("#failure")).to_contain_text("select the text instead")


def test_a_key_is_asked_for_with_the_warning(
    daemon: RunningDaemon, chromium: Browser, tmp_path: Path
) -> None:
    key, entry = new_key("ada")
    file = tmp_path / "keys.toml"
    file.write_text(entry)
    with gateway(daemon, "--keys", str(file)) as running, pages(chromium) as opener:
        running.url = f"http://{LAN_NAME}:{running.port}"
        opener.announce(401, "Cross-Origin-Opener-Policy header has been ignored")
        page = opener(running)
        expect(page.locator("dialog .not-private")).to_be_visible()
        enter_key(page, key)
        choose(page, "echo")
        ask(page, "hello")


def test_a_trusted_address_has_no_warning_and_copies_with_the_clipboard(
    http: RunningGateway, chromium: Browser
) -> None:
    with pages(chromium) as opener:
        page = opener(http)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        choose(page, "echo")
        ask(page, "copied")
        expect(page.locator(".not-private").first).to_be_hidden()
        page.get_by_role("button", name="Copy").click()
        expect(page.locator("#progress")).to_have_text("Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == "copied"


def test_no_program_needs_what_only_trusted_addresses_have(
    http: RunningGateway, chromium: Browser, lan: tuple[RunningGateway, PageOpener]
) -> None:
    with pages(chromium) as opener:
        trusted = set(opener(http).evaluate(NAMES))
    only_trusted = trusted - set(opened(lan).evaluate(NAMES))
    assert {"randomUUID", "subtle", "clipboard", "caches", "serviceWorker"} <= only_trusted
    programs = {name: file.data.decode() for name, file in FILES.items() if name.endswith(".js")}
    found = {
        (file, name)
        for file, text in programs.items()
        for name in only_trusted
        if re.search(rf"(?<![\w'\"]){re.escape(name)}\b", re.sub(r"//.*", "", text))
    }
    assert found == GUARDED
