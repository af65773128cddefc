"""Answers that try to run programs, to load something, or to take for ever.

`injections.jsonl` has an input in each line: a text, or a piece and the number of its repetitions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway
from tests.gateways.http.web_page.driver import PageOpener, ask, choose

CONFIG = echo_model("echo", **{"ctx-size": 100_000})
OPTIONS = ()
LINES = (Path(__file__).parent / "injections.jsonl").read_text().splitlines()
INPUTS = [each if isinstance(each, str) else each[0] * each[1] for each in map(json.loads, LINES)]
ATTACKS = [text for text in INPUTS if len(text) < 10_000]
DRAW_MS_MAX = 2_000
"""The limit on one drawing of a text of 20 000 characters, on a busy machine."""
OWN = {"typesetting_worker.js", "formulas.js", "libraries/katex.js", "libraries/highlight.js"}
_TAGS = (
    "a article blockquote br button code div em h3 h4 h5 h6 hr li ol p pre s span strong table"
    " tbody td th thead tr ul math menclose merror mfrac mi mmultiscripts mn mo mover mpadded"
    " mphantom mprescripts mroot mrow ms mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr"
    " munder munderover"
)
_ATTRIBUTES = (
    "aria-label class dir hidden href rel role start tabindex target title type"
    # of MathML
    " accent accentunder columnalign columnlines columnspacing depth display displaystyle fence"
    " height largeop linebreak linethickness lspace mathbackground mathcolor mathsize mathvariant"
    " maxsize minsize movablelimits notation rowalign rowlines rowspacing rspace scriptlevel"
    " separator side stretchy symmetric voffset width"
)
TAGS, ATTRIBUTES = set(_TAGS.split()), set(_ATTRIBUTES.split())
DRAW = """async (text) => {
  const { MessageBody } = await import("/page/message_body.js");
  const frame = () => new Promise(requestAnimationFrame);
  const grown = new MessageBody("assistant");
  const whole = new MessageBody("assistant");
  const article = document.createElement("article");
  article.className = "message assistant";
  article.append(grown.element, whole.element);
  document.getElementById("messages").replaceChildren(article);
  let slowest = 0;
  const measure = (work) => {
    const begin = performance.now();
    work();
    slowest = Math.max(slowest, performance.now() - begin);
  };
  measure(() => whole.show(text));
  for (const part of [0.3, 0.6, 1]) {
    grown.show(text.slice(0, Math.ceil(text.length * part)), "", part < 1);
    cancelAnimationFrame(grown.rendering.frame);
    measure(() => grown.rendering.run());
  }
  await frame();
  return slowest;
}"""
FOUND = """() => {
  const elements = [...document.querySelectorAll("#messages .text *")];
  const attributes = elements.flatMap((each) => [...each.attributes]);
  return {
    tags: [...new Set(elements.map((each) => each.localName))],
    names: [...new Set(attributes.map((each) => each.name))],
    values: [...new Set(attributes.map((each) => each.value))],
    classes: [...new Set(elements.flatMap((each) => [...each.classList]))],
    addresses: elements.filter((each) => each.hasAttribute("href")).map((each) => each.href),
    isUnharmed: document.getElementById("prompt") instanceof HTMLTextAreaElement
      && document.querySelectorAll("#messages").length === 1,
  };
}"""
CLASSES = {
    *("code-block", "code-head", "language", "small", "part"),
    *("table", "formula", "formula-block", "katex", "left", "right", "center"),
    *("function_", "class_", "language_", "inherited__", "constant_", "invoke__", "escape_"),
}


@pytest.fixture
def page(http: RunningGateway, open_page: PageOpener) -> Iterator[Page]:
    """A page that shows no dialog, opens no page and leads nowhere."""
    page = open_page(http)
    page.locator("#model option").first.wait_for(state="attached")
    found: list[str] = []
    page.on("dialog", lambda dialog: found.append(dialog.message))
    page.context.on("page", lambda other: found.append(other.url))
    page.on("framenavigated", lambda frame: found.append(frame.url))
    yield page
    assert [each for each in found if not each.startswith(f"{http.url}/#chat_")] == []


def check(page: Page, text: str) -> None:
    """Check all elements of the answers that are shown."""
    found = page.evaluate(FOUND)
    assert set(found["tags"]) <= TAGS, text
    assert set(found["names"]) <= ATTRIBUTES, text
    assert not any(name.startswith("on") or name == "style" for name in found["names"]), text
    assert all(each.startswith(("http://", "https://", "mailto:")) for each in found["addresses"])
    assert not any(re.match(r"\s*(\w*script|data):", value, re.I) for value in found["values"])
    classes = {name for name in found["classes"] if not name.startswith(("hljs-", "language-"))}
    assert classes <= CLASSES, text
    assert found["isUnharmed"], text


def test_no_input_runs_or_loads_anything_or_takes_long(page: Page) -> None:
    assert len(set(INPUTS)) == len(INPUTS) >= 400
    requested: set[str] = set()
    page.on("request", lambda request: requested.add(request.url.partition("/page/")[2]))
    for text in INPUTS:
        assert page.evaluate(DRAW, text) < DRAW_MS_MAX, text[:100]
        check(page, text)
    assert requested - {""} <= OWN, requested - OWN


def test_formulas_and_code_are_harmless_once_they_are_complete(page: Page) -> None:
    attacks = [text for text in ATTACKS if "$" in text or "\\" in text or "```" in text]
    assert len(attacks) >= 80
    for text in attacks:
        page.evaluate(DRAW, f"{text}\n\n# $last$\n\n```js\nlet last;\n```")
        heading = page.locator("#messages h3 math")
        heading.nth(1).wait_for(state="attached")
        page.locator("#messages .hljs-keyword").last.wait_for(state="attached")
        check(page, text)


def test_many_inputs_in_one_chat_are_harmless_too(page: Page) -> None:
    choose(page, "echo")
    text = "\n\n".join(ATTACKS[::4])
    ask(page, text)
    check(page, text)
    page.evaluate("location.reload()")
    page.locator(".message.assistant .text > *").first.wait_for()
    check(page, text)
