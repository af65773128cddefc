"""Answers that try to run programs, to load something, or to take for ever.

`injections.jsonl` has an input in each line: a text, or a piece and the number of its repetitions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import CDPSession, Page

from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway
from tests.gateways.http.web_page.driver import PageOpener, ask, choose, show_answer
from tests.machine_speed import slowness
from tests.repetitions import FACTOR

CONFIG = echo_model("echo", **{"ctx-size": 100_000})
OPTIONS = ()
LINES = (Path(__file__).parent / "injections.jsonl").read_text().splitlines()
PART = 1 if FACTOR > 1 else 4
"""The part of the repetitions that a usual run draws: a quarter."""
INPUTS = [
    each if isinstance(each, str) else each[0] * (each[1] // PART)
    for each in map(json.loads, LINES)
]
ATTACKS = [text for text in INPUTS if len(text) < 10_000 // PART]
CPU_S_MAX = 4.0 / PART
"""The limit on the CPU time of drawing a text of 20 000 characters or their part four times, or
many short ones, on the reference machine.
"""
BATCH = 64
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
FOUND = """(root) => {
  const elements = [...(root || document.getElementById("messages")).querySelectorAll(".text *")];
  const attributes = elements.flatMap((each) => [...each.attributes]);
  const links = elements.filter((each) => each.hasAttribute("href"));
  return {
    tags: [...new Set(elements.map((each) => each.localName))],
    names: [...new Set(attributes.map((each) => each.name))],
    values: [...new Set(attributes.map((each) => each.value))],
    classes: [...new Set(elements.flatMap((each) => [...each.classList]))],
    addresses: [...new Set(links.map((each) => each.href))],
    isUnharmed: document.getElementById("prompt") instanceof HTMLTextAreaElement
      && document.querySelectorAll("#messages").length === 1,
  };
}"""
"""Returns the elements of a message, or of all that are shown."""
DRAW = """async (texts) => {
  const { MessageBody } = await import("/page/message_body.js");
  const draw = (text) => {
    const grown = new MessageBody("assistant");
    const whole = new MessageBody("assistant");
    const article = document.createElement("article");
    article.className = "message assistant";
    article.append(grown.element, whole.element);
    document.getElementById("messages").append(article);
    whole.show(text);
    for (const part of [0.3, 0.6, 1]) {
      grown.show(text.slice(0, Math.ceil(text.length * part)), "", part < 1);
      cancelAnimationFrame(grown.rendering.frame);
      grown.rendering.run();
    }
    return article;
  };
  const found = FOUND;
  document.getElementById("messages").replaceChildren();
  return texts.map(draw).map(found);
}""".replace("FOUND", FOUND)
"""Draws texts, each at once and in three steps; returns the elements of each."""
DRAW_AND_REMOVE = f"""async (texts) => {{
  const drawn = await ({DRAW})(texts);
  document.getElementById("messages").replaceChildren();
  return drawn;
}}"""
COMPLETE = """() => [...document.querySelectorAll("#messages .text")].every((text) =>
  [...text.querySelectorAll("h3")].at(-1)?.querySelector("math")
  && [...text.querySelectorAll("pre")].at(-1)?.querySelector(".hljs-keyword"))"""
"""Returns whether the last formula and the last code of each message are typeset."""
FOUND_EACH = f"() => [...document.querySelectorAll('#messages > article')].map({FOUND})"
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


def check(found: Mapping[str, Any], text: str) -> None:
    """Check all elements of the answers that were shown."""
    assert set(found["tags"]) <= TAGS, text
    assert set(found["names"]) <= ATTRIBUTES, text
    assert not any(name.startswith("on") or name == "style" for name in found["names"]), text
    assert all(each.startswith(("http://", "https://", "mailto:")) for each in found["addresses"])
    assert not any(re.match(r"\s*(\w*script|data):", value, re.I) for value in found["values"])
    classes = {name for name in found["classes"] if not name.startswith(("hljs-", "language-"))}
    assert classes <= CLASSES, text
    assert found["isUnharmed"], text


def batches() -> Iterator[list[str]]:
    """Yield the long inputs one by one, and the others together."""
    yield from ([text] for text in INPUTS if text not in ATTACKS)
    yield from (ATTACKS[at : at + BATCH] for at in range(0, len(ATTACKS), BATCH))


def main_thread_s(session: CDPSession) -> float:
    """Return the CPU time of the page's main thread so far: a busy machine does not add to it."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "ThreadTime"))


def test_no_input_runs_or_loads_anything_or_takes_long(page: Page) -> None:
    assert len(set(INPUTS)) == len(INPUTS) >= 400
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    requested: set[str] = set()
    page.on("request", lambda request: requested.add(request.url.partition("/page/")[2]))
    for texts in batches():
        began_s = main_thread_s(session)
        results = page.evaluate(DRAW_AND_REMOVE, texts)
        cpu_s = main_thread_s(session) - began_s
        assert cpu_s < CPU_S_MAX or cpu_s < CPU_S_MAX * slowness(), texts[0][:100]
        for text, found in zip(texts, results, strict=True):
            check(found, text)
    assert requested - {""} <= OWN, requested - OWN


def test_formulas_and_code_are_harmless_once_they_are_complete(page: Page) -> None:
    attacks = [text for text in ATTACKS if "$" in text or "\\" in text or "```" in text]
    assert len(attacks) >= 80
    page.evaluate(DRAW, [f"{text}\n\n# $last$\n\n```js\nlet last;\n```" for text in attacks])
    page.wait_for_function(COMPLETE)
    for text, found in zip(attacks, page.evaluate(FOUND_EACH), strict=True):
        check(found, text)


def test_many_inputs_in_one_chat_are_harmless_too(page: Page) -> None:
    choose(page, "echo")
    sent = "\n\n".join(ATTACKS[::16])
    ask(page, sent)
    check(page.evaluate(FOUND), sent)
    page.evaluate("location.reload()")
    page.locator(".message.assistant .text > *").first.wait_for()
    check(page.evaluate(FOUND), sent)
    text = "\n\n".join(ATTACKS)
    show_answer(page, text)
    check(page.evaluate(FOUND), text)
