"""The screen of `top`: live tables with the columns that fit, and keys to cancel, park, unload."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import anyio
from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from ...backends.errors import InferdError, PermissionDenied
from ...daemon.printable import escape_controls
from ...ipc.client import AsyncClient
from ..options import EXIT_INTERRUPTED
from .top_source import client_for, take_sample
from .top_view import MODELS, SESSIONS, TASKS, Panel, Row, Sample, TopFrame, frame_of

PADDING = 2
"""The spaces around a cell."""
NAME_WIDTH_MIN = 9
"""Longer names are cut down to this width before a column is left out."""


def fit_columns(
    panel: Panel, columns: Mapping[str, Sequence[str]], available: int
) -> dict[str, int]:
    """Return the heads of the columns to show on *available* cells, with their widths, in the order
    of the panel. *columns* are the texts of each, by its head.

    The most important columns come first. Only names are cut, because half a number would be a
    wrong one.
    """
    full = {head: max(map(cell_len, (head, *columns[head]))) for head in panel.heads}
    chosen: dict[str, int] = {}
    for head in panel.importance:
        width = _width_min(columns[head], full[head]) if head in panel.names else full[head]
        if width + PADDING <= available:
            chosen[head] = width
            available -= width + PADDING
    for head in panel.importance:
        if head in panel.names and head in chosen:
            more = min(available, full[head] - chosen[head])
            chosen[head] += more
            available -= more
    return {head: chosen[head] for head in panel.heads if head in chosen}


def _width_min(names: Sequence[str], full: int) -> int:
    """Return the width to which a column of names may be cut; numbers of sessions stay whole."""
    numbers = [len(name) for name in names if name.isdigit()]
    return min(full, max(NAME_WIDTH_MIN, *numbers, 0))


UNLOAD_S_MAX = 60.0
SCROLL_KEYS = {"up": -1, "down": 1, "pageup": -8, "pagedown": 8}
"""Lines by which a key scrolls a text."""
HEADER_WIDTH_MIN = 70
"""Narrower screens get the short header."""
KEYS_HELP = """Arrows, Page Up and Page Down select a row; Tab goes to the next table.

c   cancel the selected task
p   park it: its slot goes to a waiting task,
    and it continues when a slot is free
u   unload the selected model, after a confirmation
q   quit; so does Ctrl-C

POSITION  in the queue; a task in a slot has none
CLASS     with a +: the task rose above it by waiting
TOK/S     tokens per second of its answer, or until
          that begins, of its prompt
AGE       time since the task was queued
SLOT KV   memory for the KV states of a model's slots
RAM KV    KV states kept in memory for later tasks

Any other key closes this."""
UNLOAD_QUESTION = "Unload {}?\n\ny  yes    f  even if it is in use: running turns fail    n  no"
STATES = {
    **dict.fromkeys(("ready", "running"), "green"),
    **dict.fromkeys(("loading", "waiting", "unloading"), "yellow"),
    **dict.fromkeys(("failed",), "red"),
    **dict.fromkeys(("cold", "parked", "empty", "done", "dormant"), "dim"),
}
Act = Callable[[AsyncClient, str], Awaitable[str]]


class Table(DataTable[Text]):
    """The table of a panel; its selection follows the selected key when rows move."""

    def __init__(self, panel: Panel):
        super().__init__(id=panel.title, cursor_type="row")
        self.panel = panel
        self.border_title = panel.title
        self._rows: list[Row] = []
        self._widths: dict[str, int] = {}
        """The columns on the screen, with their widths."""

    def on_mount(self) -> None:
        """Show the heads."""
        self.show_rows(self.panel, [])

    def on_resize(self) -> None:
        """Show the columns that fit."""
        self.show_rows(self.panel, self._rows)

    @property
    def selected(self) -> Row | None:
        """The row under the cursor; None if there are no rows."""
        if 0 <= self.cursor_row < len(self._rows):
            return self._rows[self.cursor_row]
        return None

    def show_rows(self, panel: Panel, rows: list[Row]) -> None:
        """Show *rows*, in the columns of *panel* that fit."""
        selected, cursor_row = self.selected, self.cursor_row
        self.panel, self._rows = panel, rows
        cells = [dict(zip(self.panel.heads, row.cells, strict=True)) for row in rows]
        texts = [{head: self._cell(head, text) for head, text in row.items()} for row in cells]
        self._fit_columns(texts)
        for row in texts:
            self.add_row(*(row[head] for head in self._widths))
        if rows:
            nearest = min(cursor_row, len(rows) - 1)
            same = (n for n, row in enumerate(rows) if selected is not None and row.is_of(selected))
            self.move_cursor(row=next(same, nearest))
        self.border_title = f"{self.panel.title} ({len(rows)})"

    def _fit_columns(self, texts: list[dict[str, Text]]) -> None:
        """Remove all rows, and change the columns to those that fit."""
        columns = {head: [row[head].plain for row in texts] for head in self.panel.heads}
        bar = self.scrollbar_size_vertical if len(texts) + 1 > self.size.height else 0
        widths = fit_columns(self.panel, columns, self.size.width - bar)
        self.clear(columns=widths != self._widths)
        if widths != self._widths:
            self._widths = widths
            for head, width in widths.items():
                self.add_column(self._cell(head, head), width=width)

    def _cell(self, head: str, text: str) -> Text:
        shown = escape_controls(text).replace("\n", " ")
        style = STATES.get(shown.split(" ")[0], "") if head == "STATE" else ""
        justify: JustifyMethod = "right" if head in self.panel.numbers else "left"
        return Text(shown, style, justify=justify, no_wrap=True, overflow="ellipsis")


class TextDialog(ModalScreen[str]):
    """A text over the screen that one of *keys*, or any key, closes; the result is that key."""

    CSS = """
    TextDialog { align: center middle; overflow-y: auto; }
    TextDialog > Static { width: auto; max-width: 100%; height: auto; padding: 0 1;
                          border: solid $accent; background: $surface; }
    """

    def __init__(self, text: str, keys: tuple[str, ...] = ()):
        super().__init__()
        self._text, self._closed_by = text, keys

    def compose(self) -> ComposeResult:
        """Show the text."""
        yield Static(Text(escape_controls(self._text)))

    def on_key(self, event: Key) -> None:
        """Close with the key, or scroll a text that is higher than the screen."""
        event.stop()
        if event.key in SCROLL_KEYS and self.max_scroll_y:
            self.scroll_relative(y=SCROLL_KEYS[event.key], animate=False)
        elif not self._closed_by or event.key in self._closed_by:
            self.dismiss(event.key)


class Top(App[None]):
    """The screen of the daemon at *path*. It reconnects by itself. Textual's event loop owns it."""

    TITLE = "inferd top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #header { height: auto; max-height: 40%; padding: 0 1; }
    #line { height: auto; min-height: 1; max-height: 3; padding: 0 1; }
    #tables { height: 1fr; }
    Table { border-top: solid $primary; height: 1fr; min-height: 4; background: $background;
            overflow-x: hidden; }
    Table:focus { border-top: heavy $accent; }
    Table:focus:nocolor > .datatable--cursor { text-style: reverse; }
    #models { height: auto; max-height: 40%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "cancel_task", "Cancel"),
        Binding("p", "park_task", "Park"),
        Binding("u", "unload_model", "Unload"),
        Binding("question_mark", "explain", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(self, path: Path, interval_s: float, node: str | None = None, *, all_users: bool):
        # With its own colors, textual turns NO_COLOR into greys; with the terminal's, into none.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self.socket_path, self.interval_s, self.all_users = path, interval_s, all_users
        self._node = node
        self.daemon_client: AsyncClient | None = None
        """The connected client; None while there is no daemon."""
        self.frame: TopFrame | None = None
        self._header, self._line = Static(id="header"), Static(id="line")
        self._tables = {panel.title: Table(panel) for panel in (MODELS, TASKS, SESSIONS)}
        self._sample_now = anyio.Event()
        """Set to take the next sample before the interval is over."""
        self._acting = False
        self._lost = False

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield self._header
        with Vertical(id="tables"):
            yield from self._tables.values()
        yield self._line
        yield Footer()

    def on_mount(self) -> None:
        """Start polling the daemon."""
        self._tables[TASKS.title].focus()
        self.run_worker(self._poll_and_reconnect(), name="poll")

    async def _poll_and_reconnect(self) -> None:
        while True:
            try:
                async with client_for(self.socket_path) as client:
                    self.daemon_client = client
                    await self._poll(client)
            except InferdError as exc:
                self._lost = True
                self.show_message(f"reconnecting: {exc.message_for_people}", error=True)
            finally:
                self.daemon_client = None
            await anyio.sleep(self.interval_s)

    async def _poll(self, client: AsyncClient) -> None:
        before: Sample | None = None
        while True:
            self._sample_now = anyio.Event()
            now = await self._take_sample(client)
            self.show_frame(frame_of(before, now))
            before = now
            with anyio.move_on_after(self.interval_s):
                await self._sample_now.wait()

    async def _take_sample(self, client: AsyncClient) -> Sample:
        try:
            return await take_sample(client, self._node, all_users=self.all_users)
        except PermissionDenied as exc:
            if not self.all_users:
                raise
            self.all_users = False
            self.show_message(f"{exc.message_for_people}; showing only yours", error=True)
            return await take_sample(client, self._node, all_users=False)

    def show_frame(self, frame: TopFrame) -> None:
        self.frame = frame
        self._show_header(frame)
        for panel, rows in frame.tables():
            self._tables[panel.title].show_rows(panel, rows)
        if self._lost:
            self._lost = False
            self.show_message(f"reconnected to {frame.sample.software}")

    def on_resize(self) -> None:
        """Show the header that fits."""
        if self.frame is not None:
            self._show_header(self.frame)

    def _show_header(self, frame: TopFrame) -> None:
        header = frame.header if self.size.width >= HEADER_WIDTH_MIN else frame.short_header
        self._header.update(Text(escape_controls("\n".join(header))))

    def show_message(self, text: str, *, error: bool = False) -> None:
        """Show a message below the tables."""
        self._line.update(Text(escape_controls(text), "bold red" if error else ""))

    def action_cancel_task(self) -> None:
        """Cancel the selected task."""
        self._run_on_task(_cancel)

    def action_park_task(self) -> None:
        """Park the selected task."""
        self._run_on_task(_park)

    def action_unload_model(self) -> None:
        """Unload the selected model after a confirmation."""
        row = self._tables[MODELS.title].selected
        if row is None:
            self.show_message("there is no model to unload", error=True)
            return
        name = row.key

        def answer(key: str | None) -> None:
            if key in ("y", "f"):
                self._run_action(name, partial(_unload, force=key == "f"))

        what = name if row.node is None else f"{name} on all nodes"
        page = TextDialog(UNLOAD_QUESTION.format(what), ("y", "f", "n", "escape"))
        self.push_screen(page, answer)

    def action_explain(self) -> None:
        """List the keys."""
        self.push_screen(TextDialog(KEYS_HELP))

    def action_interrupt(self) -> None:
        """Exit with the status of an interrupt."""
        self.exit(return_code=EXIT_INTERRUPTED)

    def _run_on_task(self, act: Act) -> None:
        row = self._tables[TASKS.title].selected
        if row is None:
            self.show_message("no task is selected", error=True)
        else:
            self._run_action(row.key, act)

    def _run_action(self, key: str, act: Act) -> None:
        """Run *act* for *key*; only one action runs at a time."""
        if self.daemon_client is None:
            self.show_message("not connected to the daemon", error=True)
        elif self._acting:
            self.show_message("the daemon has not answered the previous command yet")
        else:
            self._acting = True
            self.run_worker(self._act(self.daemon_client, key, act), name="action")

    async def _act(self, client: AsyncClient, key: str, act: Act) -> None:
        try:
            self.show_message(await act(client, key))
        except InferdError as exc:
            self.show_message(exc.text_for_people, error=True)
        finally:
            self._acting = False
        self._sample_now.set()


async def _cancel(client: AsyncClient, context: str) -> str:
    cancelled = await client.cancel(int(context))
    return (
        f"the task of session {context} is cancelled" if cancelled else "the task has already ended"
    )


async def _park(client: AsyncClient, context: str) -> str:
    if await client.park(int(context)):
        return f"the task of session {context} is parked"
    return f"the task of session {context} is not parked: no other task waits for its slot"


async def _unload(client: AsyncClient, name: str, *, force: bool) -> str:
    await client.unload_model(name, force=force, timeout=UNLOAD_S_MAX)
    return f"{name} is unloaded"
