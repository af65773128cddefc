"""Pages of a gateway in the browser, and the steps that users do on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    ViewportSize,
    expect,
)

from tests.gateways.http.driver import RunningGateway

WAIT_MS = 60_000
UNKNOWN_KEY = "the gateway does not know this key (enter another, or ask its operator for one)"
LAN_NAME = "lan.test"
"""A name for this machine by which it is not a trusted origin, as an address in a LAN is none."""
WIDE = ViewportSize(width=1300, height=1000)
"""The size of a page that shows its activity."""
HTTP_ERROR, NETWORK_ERROR = "the server responded with a status of {}", "net::ERR_"
"""Chromium's lines for a response that is an error, and for a request without a response."""


class PageOpener:
    """Opens pages in one browser context, and notes their errors.

    An error is an exception, an error in the console, or a request to another address.
    """

    def __init__(self, context: BrowserContext):
        self._context = context
        self._announced: list[str] = []
        self.errors: list[str] = []

    def __call__(
        self, running: RunningGateway, path: str = "/", viewport_size: ViewportSize | None = None
    ) -> Page:
        """Open a page of a gateway."""
        page = self._context.new_page()
        if viewport_size:
            page.set_viewport_size(viewport_size)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._note_line)
        page.on("request", lambda request: self._note_request(running, request))
        page.goto(running.url + path)
        return page

    def announce(self, *errors: str | int) -> None:
        """Allow errors in the console with these texts, or for responses of these statuses."""
        self._announced += [
            HTTP_ERROR.format(each) if isinstance(each, int) else each for each in errors
        ]

    def _note_line(self, line: ConsoleMessage) -> None:
        if line.type == "error" and not any(each in line.text for each in self._announced):
            self.errors.append(f"{line.text} ({line.location['url']})")

    def _note_request(self, running: RunningGateway, request: Request) -> None:
        if not request.url.removeprefix("blob:").startswith(running.url):
            self.errors.append(request.url)


@contextmanager
def pages(chromium: Browser) -> Iterator[PageOpener]:
    """Yield an opener of pages, which at the end have had no error that was not announced."""
    with chromium.new_context() as context:
        context.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        opener = PageOpener(context)
        yield opener
    assert opener.errors == [], opener.errors


def choose(page: Page, model: str) -> None:
    expect(page.locator(f"#model option:text-is('{model}')")).to_have_count(1)
    page.select_option("#model", model)


def send(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def ask(page: Page, text: str) -> None:
    """Send a message, and wait until its answer is complete and stored."""
    count = page.locator(".message.assistant").count()
    send(page, text)
    expect(page.locator(".message.assistant")).to_have_count(count + 1)
    expect(page.locator("#send")).to_be_visible()
    expect(page.get_by_role("button", name="Branch from here")).to_have_count(count + 1)


def shown_model(page: Page, name: str) -> Locator:
    """Return a model in the list of models."""
    return page.locator("#models li", has=page.locator(".name", has_text=name))


def enter_key(page: Page, key: str) -> None:
    page.locator("#key").fill(key)
    page.get_by_role("button", name="Continue").click()


def show_answer(page: Page, *pieces: str) -> Locator:
    """Show an answer that arrives in pieces, one a frame, without a daemon; return its place.

    One piece is shown at once, as an answer of the history is.
    """
    page.locator("#model option").first.wait_for(state="attached")  # the page has begun
    page.evaluate(_SHOW, list(pieces))
    return page.locator("#messages .text").last


_SHOW = """async (pieces) => {
  const { MessageBody } = await import("/page/message_body.js");
  const body = new MessageBody("assistant");
  const article = document.createElement("article");
  article.className = "message assistant";
  article.append(body.element);
  document.getElementById("messages").replaceChildren(article);
  const frame = () => new Promise(requestAnimationFrame);
  let text = "";
  for (const piece of pieces.slice(0, -1)) {
    text += piece;
    body.show(text, "", true);
    await frame();
  }
  body.show(text + pieces.at(-1));
  while (body.rendering.frame) await frame();
}"""
