"""The gains of models by drafts are kept for days, over restarts, and shown."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import structlog.testing

from inferd import Client
from inferd.cli.models.show_command import sections_of
from inferd.daemon.models import draft_gains
from inferd.daemon.models.draft_gains import DAY_S, DAYS, NO_GAIN, DraftGain, DraftGains
from inferd.testing import running_daemon
from tests.echo import echo_model
from tests.waiting import wait_until

GAIN = DraftGain(drafted=10, accepted=8, tokens=12, us=1000, plain_us=1500)


class Machine:
    """A clock, and the totals of a daemon's models."""

    def __init__(self) -> None:
        self.day = 20_000.5
        self.totals: dict[str, DraftGain] = {}

    def gains(self, path: Path) -> DraftGains:
        self.totals = {}
        return DraftGains(path, lambda: dict(self.totals), lambda: self.day * DAY_S)


async def save(gains: DraftGains, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_gains, "SAVE_S", 0.01)
    with anyio.move_on_after(0.05):
        await gains.run()


@pytest.mark.asyncio
async def test_gains_count_for_a_week_and_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, path = Machine(), tmp_path / "state" / "drafts.json"
    gains = machine.gains(path)
    assert gains.gain_of("m") == NO_GAIN
    machine.totals = {"m": GAIN, "other": NO_GAIN}
    assert gains.gain_of("m") == gains.gain_of("m") == GAIN
    machine.day += DAYS - 1
    machine.totals = {"m": GAIN.plus(GAIN)}
    await save(gains, monkeypatch)
    gains = machine.gains(path)
    assert gains.gain_of("m") == GAIN.plus(GAIN)
    machine.day += 1
    assert gains.gain_of("m") == GAIN, "the first day is over"
    machine.day += DAYS
    assert gains.gain_of("m") == NO_GAIN
    await save(gains, monkeypatch)
    assert b'"m"' not in path.read_bytes()
    machine.day -= 3 * DAYS  # the clock was wrong
    machine.totals = {"m": GAIN}
    assert gains.gain_of("m") == GAIN


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"version": 2}', b'{"models": {"m": {"1": ["x"]}}}', b" " * (2 << 20)]
)
@pytest.mark.asyncio
async def test_a_file_that_cannot_be_read_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "drafts.json"
    path.write_bytes(content)
    with structlog.testing.capture_logs() as logs:
        gains = Machine().gains(path)
    assert [entry["event"] for entry in logs] == ["drafts.ignored"]
    assert gains.gain_of("m") == NO_GAIN


@pytest.mark.asyncio
async def test_a_write_that_fails_is_repeated_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, path = Machine(), tmp_path / "drafts.json"
    path.with_suffix(".new").mkdir()
    gains = machine.gains(path)
    machine.totals = {"m": GAIN}
    with structlog.testing.capture_logs() as logs:
        await save(gains, monkeypatch)
    assert [entry["event"] for entry in logs] == ["drafts.unsaved"]
    path.with_suffix(".new").rmdir()
    await save(gains, monkeypatch)
    assert machine.gains(path).gain_of("m") == GAIN


def test_the_gain_in_an_earlier_daemon_is_shown() -> None:
    text = "the quick brown fox; the quick brown fox; the quick brown fox; " * 3
    with running_daemon(echo_model("m", step_ms=10, speculation="ngram")) as daemon:
        with Client(daemon.socket) as client, client.session("m", raw=True) as session:
            assert client.show("m")["drafts"] is None
            assert session.chat(text) == text
            metadata = session.metadata
            drafted, accepted = metadata["drafted_tokens"], metadata["accepted_tokens"]
            assert 0 < accepted <= drafted
            wait_until(lambda: (client.show("m")["drafts"] or {}).get("accepted") == accepted)
        daemon.stop()
        daemon.start_again()
        with Client(daemon.socket) as client:
            shown = client.show("m")
    drafts = shown["drafts"]
    assert drafts is not None and shown["info"] is None
    assert (drafts["drafted"], drafts["accepted"]) == (drafted, accepted)
    [[_, entries]] = [s for s in sections_of(shown) if s[0] == "State"]
    fast, plain = (drafts["tokens"] / drafts[key] for key in ("seconds", "plain_seconds"))
    assert dict(entries)["accepted drafts"] == (
        f"{accepted} of {drafted} tokens ({accepted / drafted:.0%}) in 7 days:"
        f" {fast:.1f} instead of {plain:.1f} tokens/s in steps with drafts"
    )
