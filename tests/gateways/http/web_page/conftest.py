from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.gateways.http.web_page.driver import LAN_NAME, PageOpener, pages
from tools.get_browser import MISSING, browser


@contextmanager
def _shown_as_running(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Show Playwright's event loop as the running one, as its calls expect, in this block only.

    Playwright leaves it shown between its calls, where other tests could run no loop of their own.
    """
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(None)


@pytest.fixture(scope="package")
def _browser() -> Iterator[tuple[Browser, asyncio.AbstractEventLoop]]:
    """A browser, and the event loop of its driver."""
    path = browser()
    assert path is not None, MISSING
    options = ["--no-sandbox", f"--host-resolver-rules=MAP {LAN_NAME} 127.0.0.1"]
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=options)
        loop = asyncio.get_running_loop()
        yield running, loop
        asyncio._set_running_loop(loop)  # until Playwright has ended it, below
        running.close()
    asyncio._set_running_loop(None)


@pytest.fixture(scope="module")
def chromium(_browser: tuple[Browser, asyncio.AbstractEventLoop]) -> Iterator[Browser]:
    """The one browser of these files: a start takes a second of CPU time."""
    running, loop = _browser
    with _shown_as_running(loop):
        yield running


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[PageOpener]:
    """Opens pages, which fail the test if they have an error that was not announced."""
    with pages(chromium) as opener:
        yield opener
