"""Answers as elements: Markdown, code with its colors, formulas; and the text of users as typed."""

from __future__ import annotations

import random
import re
from typing import Any, Literal

import pytest
from playwright.sync_api import Locator, Page, Route, ViewportSize, expect

from inferd.gateways.http.web_page.api import FILES
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway
from tests.gateways.http.web_page.contrast import texts_of
from tests.gateways.http.web_page.driver import PageOpener, ask, choose, show_answer
from tests.repetitions import repetitions

CONFIG = echo_model("echo")
OPTIONS = ()
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
PYTHON = 'def f(x):\n    """Say."""\n    return x + 1  # one\n\n\nprint(f("a"))'
MARKDOWN = """\
# Title

Some **bold**, *slanted*, ~~struck~~ and `code`.
A second line, [named](https://example.org/a?b=1&c=2 "title") and https://bare.example/x.

- one
- two
  - inner
    1. deep

3. third

> quoted
>
> - listed

| Left | Right |
|:-----|------:|
| a    | 12    |

---

[other] and ![picture](https://example.org/i.png)

[other]: https://example.org/other
"""
PIECES = (
    *("# Title\n", "Title\n===\n", "text ", "more text\n", "\n", "\n\n", "- item\n", "  - inner\n"),
    *("1. one\n", "   more\n", "> quote\n", "> - in\n", "```zz\n", "```\n", "~~~\n", "code\n"),
    *("    indented\n", "| a | b |\n", "|---|:-:|\n", "| 1 | 2 |\n", "**bold** ", "*slanted* "),
    *(
        "`code` ",
        "***\n",
        "---\n",
        "[name](https://a.example) ",
        "[ref] ",
        "![i](https://a.example) ",
    ),
    *("[ref]: https://b.example\n", "$$\n", "$$ x $$\n", "\\[\n", "\\]\n", "$5 and $6 ", "~~a~~ "),
    *(
        "<b>html</b>\n",
        "&amp; ",
        "\\* ",
        "\t",
        "  ",
        "שלום ",
        "* * *\n",
        "+ plus\n",
        "\r\n",
        "====\n",
    ),
)
"""Pieces of random answers. No highlighter knows the language `zz`."""


@pytest.fixture
def page(http: RunningGateway, open_page: PageOpener) -> Page:
    page = open_page(http)
    page.locator("#model option").first.wait_for(state="attached")
    return page


def tags(place: Locator) -> list[str]:
    found: list[str] = place.evaluate("p => [...p.children].map((each) => each.localName)")
    return found


def test_markdown_becomes_elements(page: Page) -> None:
    place = show_answer(page, MARKDOWN)
    assert tags(place) == ["h3", "p", "ul", "ol", "blockquote", "div", "hr", "p"]
    expect(place.locator("h3")).to_have_text("Title")
    expect(place.locator("strong")).to_have_text("bold")
    expect(place.locator("em")).to_have_text("slanted")
    expect(place.locator("s")).to_have_text("struck")
    expect(place.locator("p > code")).to_have_text("code")
    expect(place.locator("p br")).to_have_count(1)
    expect(place.locator("ul > li > ul > li > ol > li")).to_have_text("deep")
    expect(place.locator("ol[start='3'] > li")).to_have_text("third")
    expect(place.locator("blockquote > p")).to_have_text("quoted")
    expect(place.locator("blockquote > ul > li")).to_have_text("listed")
    expect(place.locator("td.right")).to_have_text("12")
    assert place.locator("[style], img").count() == 0


def test_links_lead_to_http_and_mail_only_and_send_no_referrer(page: Page) -> None:
    refused = "[a](ftp://x.example) [b](/page/main.js) [c](#top) [d](javascript:alert(1))"
    place = show_answer(page, f"{MARKDOWN}\n\n<mailto:a@b.example>\n\n{refused}")
    links = place.locator("a")
    assert links.evaluate_all("all => all.map((each) => each.getAttribute('href'))") == [
        "https://example.org/a?b=1&c=2",
        "https://bare.example/x",
        "https://example.org/other",
        "https://example.org/i.png",
        "mailto:a@b.example",
    ]
    for link in links.all():
        expect(link).to_have_attribute("target", "_blank")
        expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(place.locator("p").last).to_have_text(refused)


def test_an_image_is_a_link_and_is_not_loaded(page: Page) -> None:
    picture = "![picture](https://example.org/i.png)"
    place = show_answer(
        page, f"{picture} [![inner](https://example.org/j.png)](https://to.example)"
    )
    expect(place.locator("a")).to_have_text(["picture", "inner"])
    expect(place.locator("a").nth(1)).to_have_attribute("href", "https://to.example")


def test_the_text_of_users_is_shown_as_typed(page: Page) -> None:
    choose(page, "echo")
    typed = "    def f():\n        return '**x**'\n\n\n\tend  <b>"
    ask(page, f"\n  \n{typed}\n ")
    body = page.locator(".message.user .body")
    assert body.evaluate("each => each.textContent") == typed
    assert body.evaluate("each => each.innerText") == typed
    assert body.evaluate("each => each.childElementCount") == 0
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("\n  edited")
    page.get_by_label("Edited message").press("Enter")
    expect(page.locator(".message.assistant .body")).to_contain_text("edited")
    assert page.locator(".message.user .body").evaluate("e => e.textContent") == "  edited"


def test_each_block_has_the_direction_of_its_text(page: Page) -> None:
    hebrew = "שלום עולם"
    choose(page, "echo")
    ask(page, hebrew)
    body = page.locator(".message.user .body")
    assert body.evaluate("e => getComputedStyle(e).direction") == "rtl"
    text = f"{hebrew}\n\nabc {hebrew}\n\n- {hebrew}\n- {hebrew}\n\n- - -\n\n> {hebrew}\n\n"
    place = show_answer(page, f"{text}| a | {hebrew} |\n|---|---|\n\n```\n{hebrew}\n```")
    for selector, direction in (
        *(("p >> nth=0", "rtl"), ("p >> nth=1", "ltr"), ("ul", "rtl"), ("li >> nth=0", "rtl")),
        *(("blockquote p", "rtl"), ("th >> nth=0", "ltr"), ("th >> nth=1", "rtl"), ("pre", "ltr")),
    ):
        assert place.locator(selector).evaluate("e => getComputedStyle(e).direction") == direction


def test_a_wide_table_and_long_code_scroll_on_a_phone(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http, viewport_size=ViewportSize(width=360, height=740))
    row = "| " + " | ".join(["unbreakable" * 2] * 6) + " |\n"
    place = show_answer(
        page, f"{row}{'|---' * 6}|\n{row}\n```\n{'x' * 300}\n```\n\n$$ {'x+' * 80}x $$"
    )
    expect(place.locator("math")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for part in (".table", "pre", ".formula-block"):
        assert place.locator(part).evaluate("each => each.scrollWidth > each.clientWidth"), part
        assert place.locator(part).evaluate("e => e.getBoundingClientRect().right") <= 360


def test_code_has_its_language_and_colors_and_is_copied_exactly(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    place = show_answer(page, f"```python\n{PYTHON}\n```\n\n```\nplain\n```\n\n```nonsense\na\n```")
    expect(place.locator(".language")).to_have_text(["python", "", "nonsense"])
    expect(place.locator(".hljs-keyword")).to_have_text(["def", "return"])
    code = place.locator("code")
    assert code.nth(0).evaluate("each => each.textContent") == PYTHON
    expect(code).to_have_count(3)
    assert place.locator("pre").nth(2).locator("[class^=hljs]").count() == 0
    place.get_by_role("button", name="Copy code").first.click()
    expect(page.locator("#progress")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == PYTHON


def test_the_colors_of_long_code_keep_its_text(page: Page) -> None:
    code = "\n".join(f'value_{n} = """{n}\n{n}""" if {n} else None' for n in range(300))
    place = show_answer(page, f"```python\n{code}\n```")
    expect(place.locator(".hljs-number").last).to_have_text("299")
    assert place.locator("code").evaluate("each => each.textContent") == code
    assert place.locator("code").evaluate("each => each.innerText") == code
    assert place.locator(".part").count() == 12


def test_code_that_grows_is_colored_when_it_ends(page: Page) -> None:
    begun = show_answer(page, "```python\ndef f():\n", "    pass\n", "")
    expect(begun.locator(".hljs-keyword")).to_have_count(2)
    page.evaluate("""async () => {
      const { MessageBody } = await import("/page/message_body.js");
      globalThis.body = new MessageBody("assistant");
      document.getElementById("messages").replaceChildren(globalThis.body.element);
    }""")
    text = "```python\ndef f():\n    pass\n"
    for piece in ("``", "`"):
        shown = text.rstrip("`")
        page.evaluate("t => globalThis.body.show(t, '', true)", text)
        expect(page.locator("#messages code")).to_contain_text("pass")
        assert page.locator("#messages .hljs-keyword").count() == 0, shown
        text += piece
    page.evaluate("t => globalThis.body.show(t, '', true)", text + "\n\nafter")
    expect(page.locator("#messages .hljs-keyword")).to_have_text(["def", "pass"])
    assert page.locator("#messages code").evaluate("c => c.textContent") == "def f():\n    pass"


FORMULAS = [
    ("$x$ and $y^2$.", 2),
    (r"\(x\) and \(a \\ b\)", 2),
    ("$$x$$", 1),
    (r"\[ x \]", 1),
    ("$$\na\n+ b\n- c\n= d\n$$", 1),
    ("\\[\n\\begin{aligned}\na &= b \\\\\n&= c\n\\end{aligned}\n\\]", 1),
    ("so $$x$$ then \\[y\\].", 2),
    ("- \\[ x \\]\n- $$\n  y\n  $$\n", 2),
    ("> $$\n> x\n> $$\n", 1),
    ("text:\n\\[\nx\n\\]\nmore", 1),
    ("| $a$ | b |\n|---|---|\n| \\(c\\) | $d$ |", 3),
    ("the $n$th, the $i$-th", 2),
    ("**$x$** and [$y$](https://a.example)", 2),
    (r"$\$5$", 1),
    ("$5 and $6", 0),
    ("from $5 to $10, or US$7 (9 CA$)", 0),
    ("$5/month or $7/month, $3-$4", 0),
    ("it costs 5$ and 6$", 0),
    ("$5 or 6$", 0),
    ("set $HOME:$PATH", 0),
    ("`$x$` and `\\(y\\)`", 0),
    ("    $$\n    x\n    $$", 0),
    ("```\n$x$\n```", 0),
    (r"\$x\$ and \\(y\\)", 0),
    ("$ x $ and $$ and $", 0),
    ("$$\nnever closed\n\nmore", 0),
    (r"\(never closed", 0),
    ("$\\frac{$ and $\\nonsense$", 0),
    ("$" + "x" * 6000 + "$", 0),
    ("$" + r"\sqrt{" * 200 + "x" + "}" * 200 + "$", 0),
]


def test_formulas_are_typeset_and_money_is_text(page: Page) -> None:
    for text, count in FORMULAS:
        place = show_answer(page, text)
        shown = place.evaluate("each => each.textContent")
        expect(place.locator("math"), text).to_have_count(count)
        # The last formula has been tried when one behind it is there.
        behind = show_answer(page, f"{text}\n\n# $z$")
        expect(behind.locator("h3 math"), text).to_have_count(1)
        expect(behind.locator("math"), text).to_have_count(count + 1)
        if not count:
            for word in ("never closed", "frac", "x"):
                assert (word in text) == (word in shown), (text, shown)
    assert page.locator("[style]").count() == 0


def test_a_formula_that_cannot_be_typeset_stays_as_it_was_written(page: Page) -> None:
    place = show_answer(page, "a $\\frac{$ b\n\n\\[\n\\nonsense x\n\\]\n\n$z$")
    expect(place.locator("math")).to_have_count(1)
    expect(place.locator("p").nth(0)).to_have_text("a $\\frac{$ b")
    expect(place.locator("p").nth(1)).to_have_text("\\[ \\nonsense x \\]")


def test_a_displayed_formula_is_displayed_as_one(page: Page) -> None:
    place = show_answer(page, "$x$ and $$y$$\n\n\\[z\\]")
    expect(place.locator("math")).to_have_count(3)
    display = [each.get_attribute("display") for each in place.locator("math").all()]
    assert display == [None, "block", "block"]


def test_libraries_are_loaded_when_they_are_needed(page: Page) -> None:
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url.partition("/page/")[2]))
    show_answer(page, MARKDOWN + "\n\n```\nplain\n```\n\n$5 and $6")
    assert not any(requested), requested
    place = show_answer(page, "$x$")
    expect(place.locator("math")).to_have_count(1)
    assert "libraries/katex.js" in requested and "libraries/highlight.js" not in requested
    place = show_answer(page, "```js\nlet a = 1;\n```")
    expect(place.locator(".hljs-keyword")).to_have_count(1)
    assert requested.count("libraries/highlight.js") == requested.count("libraries/katex.js") == 1


SLOW_KATEX = """globalThis.katex = { renderToString(tex) {
  if (tex === "slow") for (;;);
  return "<span><math><mi>fast</mi></math></span>";
} };"""


def test_a_formula_that_takes_for_ever_does_not_stop_the_others(page: Page) -> None:
    """KaTeX is replaced by a double that does not return."""

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/javascript", body=SLOW_KATEX)

    page.context.route("**/libraries/katex.js", answer)
    place = show_answer(page, "$slow$, $a$ and $b$")
    expect(place.locator("math")).to_have_count(2)
    expect(place.locator("code.formula")).to_have_text(["$slow$"])


def test_answers_are_readable_without_the_worker(
    http: RunningGateway, open_page: PageOpener
) -> None:
    open_page.announce("net::ERR_FAILED")
    page = open_page(http)
    page.context.route("**/typesetting_worker.js", lambda route: route.abort())
    place = show_answer(page, "$x$\n\n```python\ndef f(): pass\n```")
    with page.expect_event("requestfailed"):
        show_answer(page, "$y$")
    expect(place.locator("p")).to_have_text("$y$")


def test_more_waiting_formulas_than_the_limit_stay_as_they_were_written(page: Page) -> None:
    count = page.evaluate("""async () => {
      const { typesetFormula } = await import("/page/typesetting.js");
      const all = Array.from({ length: 1010 }, () => typesetFormula("$x$"));
      return (await Promise.all(all)).filter((each) => each === null).length;
    }""")
    assert count == 10


def test_a_heading_of_an_answer_is_below_those_of_the_page(page: Page) -> None:
    place = show_answer(page, "\n".join("#" * level + f" {level}" for level in range(1, 7)))
    assert tags(place) == ["h3", "h4", "h5", "h6", "h6", "h6"]


def test_a_paragraph_longer_than_the_limit_is_shown_as_it_was_written(page: Page) -> None:
    place = show_answer(page, "**" + "a" * 8000 + "**\n\n**b**")
    expect(place.locator("p").first).to_have_text("**" + "a" * 8000 + "**")
    expect(place.locator("strong")).to_have_text("b")


def random_answer(random_: random.Random) -> list[str]:
    text = "".join(random_.choices(PIECES, k=random_.randrange(2, 40)))
    cuts = sorted(random_.randrange(len(text) + 1) for _ in range(random_.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


COMPARE = """async (answers) => {
  const { MessageBody } = await import("/page/message_body.js");
  const frame = () => new Promise(requestAnimationFrame);
  const html = (body) => body.element.querySelector(".text").innerHTML;
  const different = [];
  for (const pieces of answers) {
    const grown = new MessageBody("assistant");
    const whole = new MessageBody("assistant");
    document.getElementById("messages").replaceChildren(grown.element, whole.element);
    let text = "";
    for (const piece of pieces) {
      grown.show(text += piece, "", true);
      await frame();
    }
    grown.show(text);
    whole.show(text);
    for (let tries = 0; tries < 300 && html(grown) !== html(whole); tries += 1) await frame();
    if (html(grown) !== html(whole)) different.push([pieces, html(grown), html(whole)]);
  }
  return different;
}"""


def test_an_answer_that_grows_becomes_the_same_as_one_shown_at_once(page: Page) -> None:
    random_ = random.Random(4)
    answers = [random_answer(random_) for _ in range(repetitions(60))]
    found: list[Any] = page.evaluate(COMPARE, answers)
    assert found == []


def test_a_long_answer_that_arrives_at_once_becomes_complete(page: Page) -> None:
    """It takes more than one step, also inside of the list and of the table."""
    items = "".join(f"- item {n} with **bold** text\n  - inner {n}\n" for n in range(300))
    rows = "".join(f"| cell {n} | `code` |\n" for n in range(300))
    text = (
        f"begin\n\n{items}\nbetween\n\n| a | b |\n|---|---|\n{rows}\nend [x]\n\n[x]: https://a.b\n"
    )
    assert page.evaluate(COMPARE, [[text], [text[:9000], text[9000:]]]) == []


def test_reasoning_grows_above_the_answer_as_it_was_written(page: Page) -> None:
    show_answer(page, "old")
    place = page.locator("#messages")
    page.evaluate("""async () => {
      const { MessageBody } = await import("/page/message_body.js");
      globalThis.body = new MessageBody("assistant");
      document.querySelector("#messages .message").replaceChildren(globalThis.body.element);
    }""")
    show = "([text, thought, grows]) => globalThis.body.show(text, thought, grows)"
    page.evaluate(show, ["", "**I** <b>", True])
    expect(place.locator(".body > .reasoning")).to_have_text("**I** <b>")
    page.evaluate(show, ["", "**I** <b>\n  think", True])
    page.evaluate(show, ["**yes**", "**I** <b>\n  think", True])
    expect(place.locator(".body > .reasoning + .text strong")).to_have_text("yes")
    reasoning = place.locator(".reasoning")
    assert reasoning.evaluate("each => each.innerText") == "**I** <b>\n  think"
    page.evaluate(show, ["**yes**", "", False])
    expect(place.locator(".body > .text:first-child")).to_have_text("yes")


def test_complete_blocks_do_not_change_again(page: Page) -> None:
    page.evaluate("""async () => {
      const { MessageBody } = await import("/page/message_body.js");
      const body = globalThis.body = new MessageBody("assistant");
      document.getElementById("messages").replaceChildren(body.element);
      globalThis.changed = [];
      new MutationObserver((changes) => globalThis.changed.push(
        ...changes.map((change) => change.target.closest?.(".text > *")?.id ?? "")))
        .observe(body.element, { childList: true, characterData: true, subtree: true });
    }""")
    begin = "first *a*\n\n- one\n- two\n\n```\ncode\n```\n\n"
    page.evaluate("t => globalThis.body.show(t, '', true)", begin + "last")
    blocks = page.locator("#messages .text > *")
    expect(blocks).to_have_count(4)
    page.evaluate("""() => {
      document.querySelectorAll("#messages .text > *").forEach((e, i) => { e.id = `block${i}`; });
      globalThis.changed.length = 0;
    }""")
    for text, whole in ((" and more", "true"), (" and more\n\n$", "true"), ("\n\nend", "false")):
        page.evaluate(f"t => globalThis.body.show(t, '', {whole})", begin + "last" + text)
        expect(blocks.last).to_contain_text(text.split()[-1])
    changed = set(page.evaluate("globalThis.changed"))
    assert changed.isdisjoint({"block0", "block1", "block2"}), changed
    expect(blocks.nth(2)).to_have_id("block2")


def test_an_answer_keeps_its_elements_when_it_is_stored(page: Page) -> None:
    choose(page, "echo")
    page.evaluate("""() => {
      new MutationObserver(() => { globalThis.first ??= document.querySelector(".text > *"); })
        .observe(document.getElementById("messages"), { childList: true, subtree: true });
    }""")
    ask(page, "one\n\ntwo " * 100)
    assert page.evaluate("globalThis.first === document.querySelector('.text > *')")


def test_the_end_of_a_growing_answer_stays_in_view_unless_the_reader_scrolls_up(
    page: Page,
) -> None:
    choose(page, "echo")
    ask(page, "word\n\n" * 100)
    at_end = "() => { const m = document.getElementById('messages');"
    at_end += " return m.scrollHeight - m.scrollTop - m.clientHeight < 80; }"
    page.wait_for_function(at_end)
    page.locator("#messages").evaluate("each => { each.scrollTop = 0; }")
    page.wait_for_function("document.getElementById('messages').scrollTop === 0")
    page.evaluate("() => document.querySelector('.text').append('x\\n'.repeat(99))")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    assert page.locator("#messages").evaluate("each => each.scrollTop") == 0


def test_the_colors_of_code_have_contrast(page: Page) -> None:
    css = FILES["answers.css"].data.decode()
    names = sorted(set(re.findall(r"\.(hljs-[\w-]+)", css)))
    show_answer(page, "```\ncode\n```")
    page.locator("#messages code").evaluate(
        """(code, names) => code.replaceChildren(...names.map((name) => {
          const span = document.createElement("span");
          span.className = name;
          span.textContent = name;
          return span;
        }))""",
        names,
    )
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        texts = texts_of(page)
        assert set(names) <= {text.text for text in texts}
        assert [text for text in texts if text.ratio < text.needed] == [], scheme
