"""The decisions of the page's programs: pure functions, called in the browser."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway
from tests.gateways.http.web_page.driver import pages

CONFIG = echo_model("echo")
OPTIONS = ()
CALL = "async ([file, name, args]) => (await import(`/page/${file}`))[name](...args)"
DAY_S, NOW = 86_400, 1_800_000_000


@pytest.fixture(scope="module")
def page(http: RunningGateway, chromium: Browser) -> Any:
    with pages(chromium) as opener:
        yield opener(http)


def call(page: Page, file: str, name: str, *arguments: Any) -> Any:
    return page.evaluate(CALL, [file, name, list(arguments)])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (7 * DAY_S, "7 days"),
        (7 * DAY_S - 1, "6 days"),
        (DAY_S, "1 day"),
        (DAY_S - 1, "23 hours"),
        (3600, "1 hour"),
        (119, "1 minute"),
        (59, "less than a minute"),
        (-5, "less than a minute"),
    ],
)
def test_a_time_is_never_longer_in_words(page: Page, seconds: int, words: str) -> None:
    assert call(page, "retention.js", "inWords", seconds) == words


@pytest.mark.parametrize(
    ("chat", "fate", "note"),
    [
        ({"kept": True, "delete_at": None}, "Kept until you delete it.", "Kept"),
        (
            {"kept": False, "delete_at": NOW + 6.5 * DAY_S},
            "Deleted in 6 days, unless you use or keep it.",
            "",
        ),
        (
            {"kept": False, "delete_at": NOW + DAY_S},
            "Deleted in 1 day, unless you use or keep it.",
            "Deleted in 1 day",
        ),
        ({"kept": False, "delete_at": None}, "", ""),
        ({"kept": True, "delete_at": None, "state": "running"}, None, "Answering…"),
        ({"kept": True, "interrupted": True}, None, "Not complete"),
    ],
)
def test_a_chat_says_when_it_is_deleted(
    page: Page, chat: dict[str, Any], fate: str | None, note: str
) -> None:
    chat = {"state": "dormant", **chat}
    assert call(page, "retention.js", "noteOf", chat, NOW) == note
    if fate is not None:
        assert call(page, "retention.js", "fateOf", chat, NOW) == fate


def test_the_bounds_of_all_chats_are_in_a_sentence(page: Page) -> None:
    bounds = {"sessions": 998, "sessions_max": 1000, "seconds_max": 7 * DAY_S}
    text = call(page, "retention.js", "rulesOf", bounds)
    assert "7 days after their last use" in text and "more than 1000 (now 998)" in text
    assert "after their last use" not in call(
        page, "retention.js", "rulesOf", {**bounds, "seconds_max": 0}
    )


def test_each_cause_of_lost_chats_has_a_sentence(page: Page) -> None:
    lost = [{"title": str(n), "reason": "age"} for n in range(5)]
    lost.append({"title": "", "reason": "sessions"})
    found = call(page, "retention.js", "lossesOf", lost)
    assert found[0].startswith("The daemon deleted “0”, “1”, “2” and 2 more because they were not")
    assert found[1].startswith("The daemon deleted “Chat” because there were too many")
    assert len(found) == 2


QUEUE = {"running": 2, "waiting": 5, "parked": 1}


@pytest.mark.parametrize(
    ("turn", "statistics", "words", "kinds"),
    [
        (
            {"state": "waiting", "position": 3, "starts_in_s": 12.4},
            QUEUE,
            "2 requests ahead of yours, about 12 s to go (2 being computed, 3 behind it).",
            ["computed"] * 2 + ["ahead"] * 2 + ["own"] + ["behind"] * 3,
        ),
        (
            {"state": "waiting", "position": 1, "starts_in_s": None},
            {"running": 1, "waiting": 1, "parked": 0},
            "Yours is next (1 being computed).",
            ["computed", "own"],
        ),
        (
            {"state": "running", "position": 0, "starts_in_s": 0},
            {"running": 2, "waiting": 0, "parked": 0},
            "Your request is being computed, beside 1 request.",
            ["computed", "own computed"],
        ),
        ({"state": "waiting", "position": None}, None, "Yours is next.", ["own"]),
    ],
)
def test_the_place_in_the_queue_is_a_picture_and_in_words(
    page: Page, turn: dict[str, Any], statistics: Any, words: str, kinds: list[str]
) -> None:
    place = call(page, "queue_picture.js", "placeOf", turn, statistics)
    assert call(page, "queue_picture.js", "placeInWords", place) == words
    boxes = call(page, "queue_picture.js", "boxesOf", place)
    assert [box["kind"] for box in boxes] == kinds


def test_a_long_queue_has_few_boxes(page: Page) -> None:
    turn = {"state": "waiting", "position": 400, "starts_in_s": 60}
    statistics = {"running": 30, "waiting": 900, "parked": 0}
    place = call(page, "queue_picture.js", "placeOf", turn, statistics)
    boxes = call(page, "queue_picture.js", "boxesOf", place)
    assert len(boxes) <= 12 and sum(box["number"] for box in boxes) == 930


@pytest.mark.parametrize(
    ("answer", "code", "cut"),
    [
        ({"hasBegun": True, "isContinued": False}, "context_length_exceeded", True),
        ({"hasBegun": False, "isContinued": False}, "connection_lost", True),
        ({"hasBegun": False, "isContinued": True}, "not_found", True),
        ({"hasBegun": False, "isContinued": False}, "out_of_memory", False),
        ({"hasBegun": False, "isContinued": False}, None, False),
    ],
)
def test_a_failure_cuts_an_answer_or_refuses_its_turn(
    page: Page, answer: dict[str, bool], code: str | None, cut: bool
) -> None:
    assert call(page, "answer.js", "isCut", answer, {"code": code}) is cut


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("", ""),
        ('{"type": "object"}', ""),
        ("[1]", "A schema is an object"),
        ("5", "A schema is an object"),
        ("null", "A schema is an object"),
        ('{\n  "type": objekt\n}', "The schema is not JSON: "),
    ],
)
def test_a_schema_is_checked_while_it_is_typed(page: Page, text: str, failure: str) -> None:
    found = call(page, "schema.js", "schemaFailure", text)
    assert found.startswith(failure) and bool(found) == bool(failure)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("What is a cat?", "What-is-a-cat.md"),
        ("../../etc/passwd", "etc-passwd.md"),
        ("", "chat.md"),
        ("???", "chat.md"),
        ("Über größe 猫", "Über-größe-猫.md"),
        ("x" * 200, f"{'x' * 60}.md"),
    ],
)
def test_a_file_has_a_name_that_all_systems_take(page: Page, title: str, name: str) -> None:
    assert call(page, "export.js", "fileName", title, "md") == name


SESSION = {
    "id": "chat_1",
    "title": "Cats",
    "model": "echo",
    "priority": "normal",
    "options": {"temp": 0},
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "# not a heading of mine"},
        {"role": "assistant", "content": [{"type": "text", "text": "A "}, {"text": "cat."}]},
    ],
}


def test_a_chat_is_exported_as_markdown(page: Page) -> None:
    text = call(page, "export.js", "asMarkdown", SESSION)
    assert text == (
        "# Cats\n\nModel: echo\n\n## System prompt\n\nBe brief.\n\n"
        "## You\n\n# not a heading of mine\n\n## Answer\n\nA cat.\n"
    )


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ({"chat_1": f"{NOW + 20} My title"}, ["My title"]),
        ({"chat_1": f"{NOW - 1} late"}, []),
        ({"chat_1": f"{NOW + 31} from a clock that is ahead"}, []),
        ({"chat_1": "garbage", "chat_2": "", "chat_3": "NaN x"}, []),
        ({f"chat_{n}": f"{NOW + n} {n}" for n in range(1, 9)}, ["8", "7", "6"]),
    ],
)
def test_the_latest_deletions_can_be_undone_for_a_while(
    page: Page, entry: dict[str, str], shown: list[str]
) -> None:
    found = call(page, "deletions.js", "undoable", entry, NOW)
    assert [each["title"] for each in found] == shown
