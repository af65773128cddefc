"""The chats of the page: titles, search, deletion, retention, settings and files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, ViewportSize, expect

from inferd.testing import running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.gateways.http.web_page.driver import PageOpener, ask, choose, pages, send
from tests.stored_chats import store_chats

CONFIG = echo_model("echo") + echo_model("other") + echo_model("slow", step_ms=40)
OPTIONS = ()
CHATS = 1000
LISTED_S_MAX = 0.3
ROWS_MAX = 50
LISTED_MS = """async (search) => {
  const list = document.getElementById("chat-list");
  const field = document.getElementById("search");
  performance.clearResourceTimings();
  const drawn = new Promise((resolve) => {
    const observer = new MutationObserver(() => {
      observer.disconnect();
      requestAnimationFrame(() => setTimeout(() => resolve(performance.now())));
    });
    observer.observe(list, { childList: true });
  });
  field.value = search;
  field.dispatchEvent(new Event("input"));
  const end = await drawn;
  const begins = performance.getEntriesByType("resource")
    .filter((each) => each.name.includes("/sessions?")).map((each) => each.startTime);
  return end - Math.max(...begins.filter((begin) => begin < end));
}"""
"""Returns the time from the request of the list until the frame that shows it."""


def titles(page: Page) -> Locator:
    return page.locator("#chat-list .title")


def new_chat(page: Page, text: str, model: str = "echo") -> None:
    page.get_by_role("button", name="New chat").click()
    choose(page, model)
    ask(page, text)


def session_of(page: Page) -> dict[str, Any]:
    """Return the open chat as the gateway has it."""
    chat = page.url.partition("#")[2]
    found: dict[str, Any] = page.evaluate(
        "async (id) => (await fetch(`/v1/inferd/sessions/${id}`)).json()", chat
    )
    return found


def test_another_model_begins_a_new_chat_with_a_note(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    new_chat(page, "with echo")
    page.fill("#prompt", "a draft")
    page.select_option("#model", "other")
    expect(page.locator(".welcome")).to_contain_text("a chat stays with its model")
    expect(page.locator("#prompt")).to_have_value("a draft")
    assert "#" not in page.url
    ask(page, "with other")
    assert session_of(page)["model"] == "other"
    titles(page).get_by_text("with echo", exact=True).click()
    expect(page.locator("#model")).to_have_value("echo")
    expect(page.locator(".message.user .body")).to_have_text(["with echo"])


def test_a_deleted_chat_is_restored_by_undo_also_after_a_reload(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    new_chat(page, "delete me")
    page.get_by_role("button", name="Delete delete me", exact=True).click()
    expect(page.locator(".welcome")).to_be_visible()
    expect(page.locator("#deletions")).to_contain_text("“delete me” is deleted.")
    expect(titles(page).get_by_text("delete me", exact=True)).to_have_count(0)
    page.reload()
    expect(page.locator("#deletions")).to_contain_text("“delete me” is deleted.")
    expect(page.locator("#connection")).to_have_text("Connected")
    expect(titles(page).get_by_text("delete me", exact=True)).to_have_count(0)
    page.get_by_role("button", name="Undo deleting delete me").click()
    expect(page.locator("#deletions")).to_be_empty()
    titles(page).get_by_text("delete me", exact=True).click()
    expect(page.locator(".message.user .body")).to_have_text(["delete me"])
    expect(page.locator("#prompt")).to_be_focused()


def test_the_focus_is_on_the_message_field_after_a_deletion_and_undo_is_before_it(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    new_chat(page, "by keys")
    page.get_by_role("button", name="Delete by keys", exact=True).press("Enter")
    undo = page.get_by_role("button", name="Undo deleting by keys")
    expect(undo).to_be_visible()
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(undo).to_be_focused()
    page.keyboard.press("Enter")
    expect(titles(page).get_by_text("by keys", exact=True)).to_be_visible()


def test_a_title_is_the_first_words_until_it_is_changed_and_other_browsers_have_it(
    http: RunningGateway, open_page: PageOpener, chromium: Browser
) -> None:
    page = open_page(http)
    new_chat(page, "what is\n  the   largest animal")
    expect(page.locator("#chat-title")).to_have_text("what is the largest animal")
    page.get_by_role("button", name="Rename").click()
    field = page.get_by_label("Title", exact=True)
    expect(field).to_be_focused()
    field.fill("Whales")
    field.press("Enter")
    expect(page.locator("#chat-title")).to_have_text("Whales")
    expect(page.get_by_role("button", name="Rename")).to_be_focused()
    with pages(chromium) as other:
        expect(titles(other(http)).get_by_text("Whales", exact=True)).to_be_visible()
    page.get_by_role("button", name="Rename").click()
    field.press("Escape")
    expect(field).to_be_hidden()
    page.get_by_role("button", name="Rename").click()
    field.fill("")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#chat-title")).to_have_text("what is the largest animal")


def test_chats_are_found_by_title_and_first_message(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    new_chat(page, "the Zebra crosses a road")
    new_chat(page, "a quagga " + "and so on " * 30 + "ends with xylophone")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Title", exact=True).fill("Extinct")
    page.keyboard.press("Enter")
    search = page.get_by_label("Search chats by title and first message")
    for text, found in (("zebra", ["the Zebra crosses a road"]), ("EXTINCT", ["Extinct"])):
        search.fill(text)
        expect(titles(page)).to_have_text(found)
    search.fill("xylophone")
    expect(titles(page)).to_have_text(["Extinct"])
    search.fill("nothing has this")
    expect(titles(page)).to_have_count(0)
    expect(page.locator("#found")).to_contain_text("No chat has this")
    search.fill("")
    expect(titles(page).get_by_text("the Zebra crosses a road")).to_be_visible()
    expect(page.locator("#found")).to_be_empty()


def test_a_chat_says_when_it_is_deleted_and_is_kept(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    new_chat(page, "keep this")
    fate = re.compile(r"Deleted in [67] days, unless you use or keep it\.")
    expect(page.locator("#fate")).to_have_text(fate)
    expect(page.locator("#rules")).to_contain_text("7 days after their last use")
    expect(page.locator("#rules")).to_contain_text("more than 1000")
    keep = page.locator("#keep")
    keep.click()
    expect(keep).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#fate")).to_have_text("Kept until you delete it.")
    expect(page.locator("#chat-list li.current .note")).to_have_text("Kept")
    page.reload()
    expect(keep).to_have_attribute("aria-pressed", "true")
    keep.click()
    expect(page.locator("#fate")).to_have_text(fate)


def test_chats_that_the_daemon_has_deleted_are_named(chromium: Browser) -> None:
    config = "[daemon]\ndormant-sessions-max = 2\n" + echo_model("echo")
    with running_daemon(config) as daemon, gateway(daemon) as http, pages(chromium) as opener:
        page = opener(http)
        for text in ("first", "second", "third"):
            new_chat(page, text)
        page.get_by_role("button", name="New chat").click()
        page.reload()
        losses = page.locator("#losses")
        expect(losses).to_contain_text("The daemon deleted “first” because there were too many")
        losses.get_by_role("button", name="OK").click()
        expect(losses).to_be_empty()
        page.reload()
        expect(titles(page)).to_have_text(["third", "second"])
        expect(losses).to_be_empty()


def test_settings_are_stored_with_their_chat(
    http: RunningGateway, open_page: PageOpener, chromium: Browser
) -> None:
    page = open_page(http)
    page.click("#options summary")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.5")
    page.fill("#seed", "7")
    page.select_option("#priority", "low")
    choose(page, "echo")
    ask(page, "with settings")
    stored = session_of(page)
    assert stored["options"]["temp"] == 0.5 and stored["options"]["seed"] == 7
    assert stored["priority"] == "low"
    address = page.url.partition("#")[2]
    with page.expect_response(lambda response: response.request.method == "PATCH"):
        page.fill("#temperature", "0.9")
        page.locator("#temperature").blur()
    assert session_of(page)["options"]["temp"] == 0.9
    with page.expect_response(lambda response: response.request.method == "PATCH"):
        page.fill("#seed", "")
        page.locator("#seed").blur()
    assert "seed" not in session_of(page)["options"]
    with pages(chromium) as other:
        second = other(http, f"/#{address}")
        expect(second.locator("#system")).to_have_value("Be brief.")
        expect(second.locator("#temperature")).to_have_value("0.9")
        expect(second.locator("#priority")).to_have_value("low")
        second.get_by_role("button", name="New chat").click()
        expect(second.locator("#system")).to_have_value("")
        expect(second.locator("#temperature")).to_have_value("")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#temperature")).to_have_value("0.5")


def test_another_system_prompt_begins_a_new_chat_with_a_note(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http)
    new_chat(page, "without a system prompt")
    page.click("#options summary")
    page.fill("#system", "Be long.")
    page.locator("#system").blur()
    expect(page.locator(".welcome")).to_contain_text("a system prompt belongs to the beginning")
    ask(page, "with it")
    assert session_of(page)["messages"][0] == {"role": "system", "content": "Be long."}


def test_a_schema_is_checked_before_it_is_sent(http: RunningGateway, open_page: PageOpener) -> None:
    page = open_page(http)
    choose(page, "echo")
    page.click("#options summary")
    page.fill("#schema", '{"type": ')
    expect(page.locator("#schema-failure")).to_contain_text("The schema is not JSON")
    page.click("#options summary")
    send(page, "text")
    expect(page.locator("#prompt")).to_have_value("text")
    expect(page.locator("#schema")).to_be_visible()  # the browser shows the field that is wrong
    assert page.locator(".message").count() == 0
    page.fill("#schema", "")
    expect(page.locator("#schema-failure")).to_be_empty()


def test_a_schema_that_the_daemon_refuses_is_shown_with_a_hint(
    http: RunningGateway, open_page: PageOpener
) -> None:
    open_page.announce(400)
    page = open_page(http)
    choose(page, "echo")
    page.click("#options summary")
    page.fill("#schema", '{"type": "objekt"}')
    send(page, "text")
    expect(page.locator("#failure")).to_contain_text("objekt")
    expect(page.locator("#prompt")).to_have_value("text")
    page.fill("#schema", "")


def test_a_chat_is_exported_as_markdown_and_json(
    http: RunningGateway, open_page: PageOpener, tmp_path: Path
) -> None:
    page = open_page(http)
    new_chat(page, "# Not **mine**")
    ask(page, "second")
    with page.expect_download() as found:
        page.get_by_role("button", name="Export as Markdown").click()
    assert found.value.suggested_filename == "Not-mine.md"
    text = Path(found.value.path()).read_text()
    assert text.startswith("# # Not **mine**\n\nModel: echo\n\n## You\n\n# Not **mine**\n")
    assert text.endswith("## You\n\nsecond\n\n## Answer\n\nsecond\n")
    with page.expect_download() as found:
        page.get_by_role("button", name="Export as JSON").click()
    assert found.value.suggested_filename == "Not-mine.json"
    chat = json.loads(Path(found.value.path()).read_text())
    assert [message["content"] for message in chat["messages"]] == ["# Not **mine**"] * 2 + [
        "second"
    ] * 2
    assert chat["model"] == "echo"


def test_a_thousand_chats_are_listed_in_a_blink_with_few_rows(chromium: Browser) -> None:
    config = "[daemon]\ndormant-sessions-max = 2000\n" + echo_model("echo")
    with running_daemon(config) as daemon:
        store_chats(daemon, "echo", CHATS)
        with gateway(daemon) as http, pages(chromium) as opener:
            page = opener(http)
            expect(titles(page)).to_have_count(ROWS_MAX)
            expect(titles(page).first).to_have_text("question 0999 about fish")
            assert page.evaluate("document.querySelectorAll('*').length") < 500
            times_s = (page.evaluate(LISTED_MS, "fish"[: 1 + n % 4]) / 1000 for n in range(20))
            assert any(time_s < LISTED_S_MAX for time_s in times_s), "another program delays some"
            page.get_by_label("Search chats by title and first message").fill("0007")
            expect(titles(page)).to_have_text(["question 0007 about fish"])
            page.get_by_label("Search chats by title and first message").fill("")
            expect(titles(page)).to_have_count(ROWS_MAX)
            page.get_by_role("button", name="Show more").click()
            expect(titles(page)).to_have_count(2 * ROWS_MAX)
            expect(page.locator("#chat-list .open").nth(ROWS_MAX)).to_be_focused()


def test_a_phone_of_320_pixels_shows_all_of_it_without_scrolling_sideways(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http, viewport_size=ViewportSize(width=320, height=640))
    choose(page, "slow")
    ask(page, "x" * 120)
    page.get_by_role("button", name="Rename").click()
    page.click("#options summary")
    for name in ("#send", "#prompt", "#title-field"):
        page.locator(name).scroll_into_view_if_needed()
        expect(page.locator(name)).to_be_in_viewport(ratio=1)
    send(page, "word " * 200)
    expect(page.locator(".message.assistant .body").last).to_contain_text("word")
    page.click("#stop")
    expect(page.locator(".cut")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.get_by_role("button", name="Chats", exact=True).click()
    page.get_by_role("button", name=re.compile("^Delete xxx")).click()
    page.get_by_role("button", name="Chats", exact=True).click()
    expect(page.locator("#deletions button")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    for control in page.locator("#chat-bar button:visible, .bar button:visible").all():
        box = control.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 320
