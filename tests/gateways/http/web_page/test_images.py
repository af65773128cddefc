"""Images on the web page: chosen, pasted and dropped, removed, sent, shown again, refused."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from playwright.sync_api import FilePayload, JSHandle, Locator, Page, expect

from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, keyed_gateway
from tests.gateways.http.web_page.driver import (
    NETWORK_ERROR,
    PageOpener,
    ask,
    choose,
    enter_key,
    send,
)
from tests.pictures import png

ITEM_BYTES_MAX = 300_000
CONFIG = (
    f"[daemon]\nmedia-bytes-max = {ITEM_BYTES_MAX}\n"
    + echo_model("eyes", media=True)
    + echo_model("blind")
)
OPTIONS = ()
PICTURE = png(40, 30)


def file_of(name: str, data: bytes = PICTURE, kind: str = "image/png") -> FilePayload:
    return FilePayload(name=name, mimeType=kind, buffer=data)


def opened(open_page: PageOpener, http: RunningGateway, model: str = "eyes") -> Page:
    page = open_page(http)
    # Playwright intercepts the browser's file chooser only while someone listens. Turned on for
    # each chooser, it can come too late for a key that opens one.
    page.on("filechooser", lambda chooser: None)
    choose(page, model)
    return page


def thumbnails(page: Page) -> Locator:
    return page.locator("#attachments img")


def names(page: Page) -> list[str]:
    return [str(each.get_attribute("alt")) for each in thumbnails(page).all()]


def attach(page: Page, *files: FilePayload) -> None:
    count = thumbnails(page).count()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach images").click()
    chooser.value.set_files([*files])
    expect(thumbnails(page)).to_have_count(count + len(files))


def shown_images(page: Page) -> Locator:
    return page.locator(".message.user .images img")


def expect_shown(image: Locator, width: int = 40) -> None:
    """Wait until an image is not only an element, but has its pixels."""
    expect(image).to_have_js_property("naturalWidth", width)


def test_an_image_is_attached_sent_and_shown_after_a_reload(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = opened(open_page, http)
    expect(page.locator("#attach")).to_have_attribute("aria-disabled", "false")
    attach(page, file_of("cat.png"), file_of("dog.png", png(50, 20)))
    assert names(page) == ["cat.png", "dog.png"]
    expect_shown(thumbnails(page).first)
    ask(page, "what is this")
    expect(thumbnails(page)).to_have_count(0)
    expect(page.locator(".message.user .body")).to_have_text("what is this")
    expect(page.locator(".message.assistant .body")).to_contain_text("what is this")
    page.reload()
    images = shown_images(page)
    expect(images).to_have_count(2)
    expect_shown(images.first)
    expect_shown(images.nth(1), 50)
    assert [each.get_attribute("alt") for each in images.all()] == ["cat.png", "dog.png"]


def test_an_image_without_a_text_is_sent(http: RunningGateway, open_page: PageOpener) -> None:
    page = opened(open_page, http)
    attach(page, file_of("cat.png"))
    ask(page, "")
    expect_shown(shown_images(page).first)
    expect(page.locator(".message.user .body")).to_be_hidden()


def test_an_image_is_removed_with_the_keyboard(http: RunningGateway, open_page: PageOpener) -> None:
    page = opened(open_page, http)
    attach(page, file_of("a.png"), file_of("b.png"), file_of("c.png"))
    page.focus("#prompt")
    page.keyboard.press("Shift+Tab")
    expect(page.get_by_role("button", name="Remove c.png")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Remove c.png")).to_be_focused()
    assert names(page) == ["a.png", "c.png"]
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    expect(thumbnails(page)).to_have_count(0)
    expect(page.locator("#attach")).to_be_focused()
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    assert chooser.value.is_multiple()


def test_an_image_is_pasted_from_the_clipboard(http: RunningGateway, open_page: PageOpener) -> None:
    page = opened(open_page, http)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=http.url)
    page.evaluate(_COPY, b64encode(PICTURE).decode())
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    expect(thumbnails(page)).to_have_count(1)
    page.keyboard.press("Control+V")
    expect(thumbnails(page)).to_have_count(2)
    assert names(page) == ["Pasted image 1", "Pasted image 2"]
    page.evaluate("navigator.clipboard.writeText('only text')")
    page.keyboard.press("Control+V")
    expect(page.locator("#prompt")).to_have_value("only text")
    ask(page, "two")
    expect(shown_images(page)).to_have_count(2)


_COPY = """async (data) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  const image = new Blob([bytes], { type: "image/png" });
  await navigator.clipboard.write([new ClipboardItem({ "image/png": image })]);
}"""


def dragged(page: Page, *files: FilePayload) -> JSHandle:
    described: list[Any] = [
        [each["name"], each["mimeType"], b64encode(each["buffer"]).decode()] for each in files
    ]
    return page.evaluate_handle(_DRAGGED, described)


_DRAGGED = """(files) => {
  const data = new DataTransfer();
  for (const [name, type, text] of files) {
    const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  return data;
}"""


def test_images_are_dropped_anywhere_and_the_page_stays(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = opened(open_page, http)
    data = dragged(page, file_of("cat.png"), file_of("note.txt", b"x", "text/plain"))
    page.dispatch_event("main", "dragover", {"dataTransfer": data})
    expect(page.locator("main")).to_have_class("dropping")
    page.dispatch_event("main", "drop", {"dataTransfer": data})
    expect(thumbnails(page)).to_have_count(1)
    expect(page.locator("main")).not_to_have_class("dropping")
    page.dispatch_event("header", "drop", {"dataTransfer": dragged(page, file_of("dog.png"))})
    expect(thumbnails(page)).to_have_count(2)
    text = dragged(page, file_of("note.txt", b"x", "text/plain"))
    page.dispatch_event("main", "drop", {"dataTransfer": text})
    expect(page.locator("#failure")).to_contain_text("Only images can be attached.")
    assert names(page) == ["cat.png", "dog.png"]


def test_a_model_that_reads_no_images_says_so(http: RunningGateway, open_page: PageOpener) -> None:
    page = opened(open_page, http, "blind")
    button = page.get_by_role("button", name="Attach images")
    reason = "The model blind does not read images."
    expect(button).to_have_attribute("aria-disabled", "true")
    expect(button).to_have_attribute("aria-description", reason)
    button.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#failure")).to_contain_text(reason)
    choose(page, "eyes")
    expect(button).to_have_attribute("aria-disabled", "false")
    attach(page, file_of("cat.png"))
    choose(page, "blind")
    send(page, "what is this")
    expect(page.locator("#failure")).to_contain_text(reason)
    expect(page.locator("#prompt")).to_have_value("what is this")
    expect(page.locator(".message")).to_have_count(0)
    expect(thumbnails(page)).to_have_count(1)


def large_file(page: Page, name: str, width: int, height: int) -> FilePayload:
    """Return an image that the browser has painted."""
    data = page.evaluate(_PAINT, [width, height])
    return file_of(name, bytes(data), "image/png")


_PAINT = """async ([width, height]) => {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.fillStyle = "teal";
  context.fillRect(0, 0, width, height);
  const blob = await canvas.convertToBlob({ type: "image/png" });
  return [...new Uint8Array(await blob.arrayBuffer())];
}"""


def test_an_image_with_many_pixels_is_scaled_with_a_note(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = opened(open_page, http)
    attach(page, large_file(page, "wide.png", 5000, 1000))
    note = "wide.png was scaled to 2048 × 410 pixels"
    expect(page.locator("#progress")).to_contain_text(note)
    expect_shown(thumbnails(page).first, 2048)
    ask(page, "small enough")
    expect_shown(shown_images(page).first, 2048)


def test_a_file_that_is_no_image_is_refused_in_a_sentence(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = opened(open_page, http)
    drawing = file_of("drawing.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml")
    for bad in (drawing, file_of("broken.png", PICTURE[:30]), file_of("page.png", b"<html>")):
        with page.expect_file_chooser() as chooser:
            page.click("#attach")
        chooser.value.set_files([bad])
        expect(page.locator("#failure")).to_contain_text(f"{bad['name']} cannot be read")
    attach(page, *(file_of(f"{number}.png") for number in range(8)))
    with page.expect_file_chooser() as chooser:
        page.click("#attach")
    chooser.value.set_files([file_of("9.png")])
    expect(page.locator("#failure")).to_contain_text("at most 8 images")
    expect(thumbnails(page)).to_have_count(8)


def test_a_refused_message_comes_back_with_its_images(
    http: RunningGateway, open_page: PageOpener
) -> None:
    open_page.announce(413)
    page = opened(open_page, http)
    attach(page, file_of("heavy.png", png(40, 30, padding=ITEM_BYTES_MAX)))
    send(page, "too much")
    expect(page.locator("#failure")).to_contain_text(str(ITEM_BYTES_MAX))
    expect(page.locator("#prompt")).to_have_value("too much")
    expect(thumbnails(page)).to_have_count(1)
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("button", name="Remove heavy.png").click()
    attach(page, file_of("light.png"))
    ask(page, "less")
    expect(page.locator(".message.user .body").last).to_have_text("less")
    expect(shown_images(page)).to_have_count(1)


def test_an_edited_and_a_regenerated_message_keep_their_images(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = opened(open_page, http)
    attach(page, file_of("cat.png"))
    ask(page, "first")
    page.reload()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("changed")
    page.get_by_label("Edited message").press("Enter")
    expect(page.locator(".message.user .body")).to_have_text(["changed"])
    expect(page.locator(".message.assistant .body")).to_contain_text("changed")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    expect_shown(shown_images(page).first)
    with page.expect_response("**/v1/chat/completions"):
        page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#send")).to_be_visible()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(shown_images(page)).to_have_count(1)
    page.get_by_role("button", name="Branch from here").click()
    expect(page.locator("#progress")).to_contain_text("branch")
    expect_shown(shown_images(page).first)


def test_an_image_is_in_the_exported_chat(http: RunningGateway, open_page: PageOpener) -> None:
    page = opened(open_page, http)
    attach(page, file_of("cat.png"))
    ask(page, "keep it")
    with page.expect_download() as download:
        page.click("#export-json")
    text = download.value.path().read_text()
    assert f"data:image/png;base64,{b64encode(PICTURE).decode()}" in text
    with page.expect_download() as download:
        page.click("#export-markdown")
    assert "(Image: cat.png)" in download.value.path().read_text()


def test_images_are_sent_on_a_phone_with_a_key(
    daemon: RunningDaemon, open_page: PageOpener, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The images of messages need the key as all else does."""
    open_page.announce(401, NETWORK_ERROR)
    folder = tmp_path_factory.mktemp("keys")
    with keyed_gateway(daemon, folder, ["ada"]) as (running, keys):
        page = open_page(running, viewport_size={"width": 390, "height": 800})
        enter_key(page, keys["ada"])
        choose(page, "eyes")
        field = page.locator("#image-files")
        assert field.get_attribute("accept") == "image/*", "a phone offers its camera"
        attach(page, file_of("cat.png"))
        ask(page, "on the way")
        page.reload()
        expect_shown(shown_images(page).first)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390
