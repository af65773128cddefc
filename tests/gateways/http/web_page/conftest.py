from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.gateways.http.web_page.driver import LAN_NAME, PageOpener, pages
from tools.get_browser import MISSING, browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for a module's tests."""
    path = browser()
    assert path is not None, MISSING
    with sync_playwright() as playwright:
        options = ["--no-sandbox", f"--host-resolver-rules=MAP {LAN_NAME} 127.0.0.1"]
        running = playwright.chromium.launch(executable_path=path, args=options)
        yield running
        running.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[PageOpener]:
    """Opens pages, which fail the test if they have an error that was not announced."""
    with pages(chromium) as opener:
        yield opener
