"""Confinement of the configuration's relative paths to their folder, despite links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferd.daemon.config.model_settings import check_confined
from inferd.daemon.config.sources import ConfigError, load_config

NAMED = {
    "file": '[models.m]\nfile = "{}"',
    "adapter": '[models.m.adapters]\na = "{}"',
    "template": '[models.m]\nchat-template-file = "{}"',
    "projector": '[models.m]\nmmproj = "{}"',
    "default": '[defaults]\nchat-template-file = "{}"',
}
"""Keys of the configuration that name files."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return the configuration's folder, beside which are secrets and a folder of models."""
    folder, models, outside = tmp_path / "etc", tmp_path / "models", tmp_path / "outside"
    for one in (folder, models, outside, folder / "below"):
        one.mkdir()
    for file in (outside / "secret", folder / "here", folder / "below" / "there", models / "m"):
        file.write_text("x")
    for home in (folder, models):
        (home / "out").symlink_to(outside / "secret")
        (home / "way").symlink_to(outside)
        (home / "hop").symlink_to("out")
        (home / "circle").symlink_to("circle")
    (folder / "dangling").symlink_to(outside / "nothing")
    (folder / "in").symlink_to("below/there")
    (folder / "around").symlink_to(folder / "here")
    (models / "only-there").symlink_to(outside / "secret")
    return folder


def read(place: Path, text: str) -> None:
    path = place / "inferd.toml"
    path.write_text(f'[daemon]\nmodels-dir = "../models"\n{text}\n')
    load_config({"config": path}, {})


@pytest.mark.parametrize("key", NAMED)
@pytest.mark.parametrize(
    "name", ["here", "below/there", "in", "around", "m", "not-yet", "x/not-yet"]
)
def test_a_path_below_the_folder_is_accepted(place: Path, key: str, name: str) -> None:
    read(place, NAMED[key].format(name))


@pytest.mark.parametrize("key", NAMED)
@pytest.mark.parametrize(
    "name",
    ["out", "way/secret", "hop", "circle", "dangling", "only-there", "../outside/secret", "..",
     "below/../../outside/secret", "way/not-yet", "x" * 300],
)  # fmt: skip
def test_a_path_that_leads_out_of_the_folder_is_refused(place: Path, key: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(place, NAMED[key].format(name))
    [line] = caught.value.lines
    assert name in line
    assert "write an absolute path" in line or "cannot be resolved" in line


@pytest.mark.parametrize("key", NAMED)
def test_an_absolute_path_is_accepted(place: Path, key: str) -> None:
    read(place, NAMED[key].format(place / "out"))


def test_the_folder_itself_may_be_reached_by_links(place: Path) -> None:
    other = place.parent / "link"
    other.symlink_to(place)
    check_confined(other, other / "here")
    check_confined(place, place / "below")
    with pytest.raises(ValueError, match="leads out"):
        check_confined(place / "below", place / "below" / ".." / "here")


def test_a_link_added_later_is_checked_when_the_file_is_read_again(place: Path) -> None:
    text = NAMED["template"].format("not-yet")
    read(place, text)
    os.symlink(place.parent / "outside" / "secret", place / "not-yet")
    with pytest.raises(ConfigError):
        read(place, text)
