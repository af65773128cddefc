"""Pictures of the gateway's web page in docs/, from a chat with SmolLM2."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

from inferd.testing import running_daemon
from tools.chat import MODELS, running_gateway
from tools.get_browser import MISSING, browser

DOCS = Path(__file__).resolve().parent.parent / "docs"
MODEL = "smollm2-135m-instruct"
QUESTIONS = (
    "Give me three tips for better sleep, as a short list.",
    "Why is caffeine bad for sleep? One sentence.",
)
WIDTH, HEIGHT = 1280, 760
PHONE_WIDTH, PHONE_HEIGHT = 390, 760
ANSWER_MS_MAX = 60_000.0


def draw(folder: Path, models: Path | None = MODELS, model: str = MODEL) -> None:
    """Draw the pictures into *folder*, from a chat with a model of the folder *models*: in both
    color schemes, and as wide as a phone.
    """
    from playwright.sync_api import ViewportSize, expect, sync_playwright

    path = browser()
    if path is None:
        raise SystemExit(MISSING)
    expect.set_options(timeout=ANSWER_MS_MAX)
    with (
        running_daemon(models_dir=models) as daemon,
        sync_playwright() as playwright,
        running_gateway(str(daemon.socket), 0) as (_, address),
    ):
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = running.new_page(
            viewport=ViewportSize(width=WIDTH, height=HEIGHT), color_scheme="light"
        )
        page.goto(f"http://{address}/")
        expect(page.locator(f"#model option:text-is('{model}')")).to_have_count(1)
        page.select_option("#model", model)
        page.click("#options summary")
        page.fill("#temperature", "0")
        page.fill("#max-tokens", "120")
        page.click("#options summary")
        for number, question in enumerate(QUESTIONS, 1):
            page.fill("#prompt", question)
            page.press("#prompt", "Enter")
            branches = page.get_by_role("button", name="Branch from here")
            expect(branches).to_have_count(number)
        page.locator("#chat-list li").first.wait_for()
        expect(page.get_by_text("Nothing is waiting.")).to_be_visible()
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for scheme in schemes:
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=folder / f"page-{scheme}.png")
        page.set_viewport_size(ViewportSize(width=PHONE_WIDTH, height=PHONE_HEIGHT))
        page.emulate_media(color_scheme="light")
        page.get_by_role("button", name="Activity").click()  # it would cover the chat
        page.screenshot(path=folder / "page-phone.png")
        running.close()


def main() -> int:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(prog="make page-picture", description="draw the web page")
    parser.add_argument("--folder", type=Path, default=DOCS)
    draw(parser.parse_args().folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
