"""Errors on the web page: each is shown with its message and its hint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from inferd import Client
from inferd.gateways.http.callers import new_key
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.gateways.http.web_page.driver import (
    NETWORK_ERROR,
    UNKNOWN_KEY,
    WIDE,
    PageOpener,
    ask,
    choose,
    enter_key,
    send,
    shown_model,
)
from tests.waiting import wait_until

CONFIG = (
    "[daemon]\ntasks-waiting-max = 1\nquantum-tokens = 4096\n"
    + echo_model("echo")
    + echo_model("slow", step_ms=40)
    + echo_model("single", step_ms=20, slots=1)
    + echo_model("too-big", weight_bytes=10**15)
    + f"[models.broken]\nfile = {json.dumps(__file__)}\n"
)
OPTIONS = ("--test-models",)
TOO_BIG = re.compile(r"'too-big' needs 1000 TB .* \(use a smaller model or .*\)")
BROKEN = re.compile(r"is not a GGUF file: .* \(convert the model with .*\)")
FULL = re.compile(r"1 tasks wait .* the limit is 1 \(try again in .* or raise .*\)")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A file of keys, and the keys by their names."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    entries = {"olga": "operator = true\n", "bob": "tokens-per-minute = 1\n"}
    keys = {}
    with file.open("w") as lines:
        for name, fields in entries.items():
            keys[name], entry = new_key(name)
            lines.write(entry + fields)
    yield file, keys


@pytest.fixture(scope="module")
def guarded(daemon: RunningDaemon, keys: tuple[Path, dict[str, str]]) -> Iterator[RunningGateway]:
    """A gateway that asks for a key."""
    with gateway(daemon, "--keys", str(keys[0]), *OPTIONS) as running:
        yield running


def sign_in(
    open_page: PageOpener, guarded: RunningGateway, keys: tuple[Path, dict[str, str]], name: str
) -> Page:
    open_page.announce(401)
    page = open_page(guarded, viewport_size=WIDE)
    enter_key(page, keys[1][name])
    return page


def test_a_model_that_does_not_fit_is_shown_with_a_hint(
    http: RunningGateway, open_page: PageOpener
) -> None:
    open_page.announce(503)
    page = open_page(http)
    choose(page, "too-big")
    send(page, "text")
    alert = page.locator("#failure[role=alert]")
    expect(alert).to_contain_text(TOO_BIG)
    expect(alert.get_by_role("button", name="Try again")).to_be_visible()
    expect(page.locator("#prompt")).to_have_value("text")


def test_a_failed_load_is_shown_with_a_hint(
    guarded: RunningGateway, keys: tuple[Path, dict[str, str]], open_page: PageOpener
) -> None:
    page = sign_in(open_page, guarded, keys, "olga")
    for name, failure in (("broken", BROKEN), ("too-big", TOO_BIG)):
        page.get_by_role("button", name=f"Load {name}").click()
        expect(page.locator("#failure")).to_contain_text(failure)
        model = shown_model(page, name)
        expect(model.locator(".state")).to_have_text("failed")
        expect(model.locator(".note")).to_contain_text(failure)
    page.get_by_role("button", name="Load echo").click()
    expect(page.get_by_role("button", name="Unload echo")).to_be_visible()
    expect(page.locator("#failure")).to_be_empty()


def test_a_full_queue_is_shown_with_a_hint_and_the_message_is_sent_again(
    http: RunningGateway, open_page: PageOpener, client: Client
) -> None:
    open_page.announce(503)
    page = open_page(http)
    choose(page, "single")
    first, second = (client.session("single", priority="high") for _ in range(2))
    with first, second, ThreadPoolExecutor() as threads:
        threads.submit(first.chat, "x" * 1500)
        wait_until(lambda: [task["state"] for task in client.queue()] == ["running"])
        threads.submit(second.chat, "y" * 1500)
        wait_until(lambda: len(client.queue()) == 2)
        send(page, "mine")
        alert = page.locator("#failure")
        expect(alert).to_contain_text(FULL)
        expect(page.locator("#progress")).to_have_text(re.compile(r"try again in \d+ s"))
        expect(page.locator("#prompt")).to_have_value("mine")
        for session in (second, first):
            session.cancel()
        alert.get_by_role("button", name="Try again").click()
        expect(page.locator(".message.assistant .body")).to_have_text("mine")
    expect(alert).to_be_empty()
    expect(page.locator("#prompt")).to_have_value("")


def test_a_used_quota_is_shown_with_a_hint(
    guarded: RunningGateway, keys: tuple[Path, dict[str, str]], open_page: PageOpener
) -> None:
    page = sign_in(open_page, guarded, keys, "bob")
    choose(page, "echo")
    open_page.announce(429)
    ask(page, "all of the tokens of a minute")
    send(page, "one more")
    expect(page.locator("#failure")).to_contain_text(
        re.compile(
            r"the key has used its 1 tokens per minute \(try again in \d+ min, or .*operator.*\)"
        )
    )
    expect(page.locator("#progress")).to_have_text(re.compile(r"try again in \d+ s"))
    expect(page.locator("#prompt")).to_have_value("one more")


def test_a_lost_gateway_is_shown_with_a_hint(daemon: RunningDaemon, open_page: PageOpener) -> None:
    open_page.announce(NETWORK_ERROR)
    with gateway(daemon, *OPTIONS) as first:
        page = open_page(first)
        choose(page, "slow")
        send(page, "word " * 200)
        expect(page.locator(".message.assistant .body")).to_contain_text("word word")
        first.process.kill()
        alert = page.locator("#failure")
        cut = page.locator(".message.assistant .cut")
        expect(cut).to_contain_text(re.compile(r"the connection .* was lost \(continue .*\)"))
        page.get_by_role("button", name="New chat").click()
        send(page, "hello")
        expect(alert).to_have_text(re.compile(r"the gateway does not answer \(check .*\)"))
        expect(page.locator("#prompt")).to_have_value("hello")
    with gateway(daemon, *OPTIONS, listen=first.address):
        alert.get_by_role("button", name="Try again").click()
        expect(page.locator(".message.assistant .body")).to_have_text("hello")
        expect(page.get_by_role("button", name="Branch from here")).to_be_visible()
        expect(alert).to_be_empty()


def test_a_key_is_kept_in_its_tab_only(
    guarded: RunningGateway, keys: tuple[Path, dict[str, str]], open_page: PageOpener
) -> None:
    open_page.announce(401)
    page = open_page(guarded, viewport_size=WIDE)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url + (request.post_data or "")))
    field, failure = page.locator("#key"), page.locator("#key-failure")
    for wrong in ("sk-wrong", "ключ"):
        enter_key(page, wrong)
        expect(page.locator("#key-dialog")).to_be_visible()
        expect(failure).to_have_text(UNKNOWN_KEY)
    assert field.evaluate("field => field.validity.patternMismatch"), "no header can have it"
    key = keys[1]["bob"]
    enter_key(page, f" {key} ")
    expect(page.locator("#models li")).to_have_count(5)
    assert page.locator("#models button").count() == 0, "only operators change models"
    choose(page, "echo")
    page.reload()
    expect(page.locator("#connection")).to_have_text("Connected")
    assert key in page.evaluate("JSON.stringify(sessionStorage)")
    stored = page.evaluate(
        "async () => JSON.stringify([localStorage, document.cookie, location.href,"
        " history.state, await indexedDB.databases(), await caches.keys()])"
    )
    assert key not in stored and "inferd-choices" in stored
    assert requests and not any(key in request for request in requests)
    other = open_page(guarded)
    expect(other.locator("#key-dialog")).to_be_visible()
    expect(other.locator("#key-failure")).to_be_empty()
    page.get_by_role("button", name="Key", exact=True).click()
    expect(page.locator("#key-dialog")).to_be_visible()
    assert key not in page.evaluate("JSON.stringify(sessionStorage)")
