"""`make page-picture`, on the model echo."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tools import page_picture


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    page_picture.draw(folder, models=None, model="echo")
    return folder


@pytest.mark.process
@pytest.mark.parametrize("name", ["light", "dark", "phone"])
def test_it_draws_the_pictures_of_the_documentation(pictures: Path, name: str) -> None:
    readme = (page_picture.DOCS.parent / "README.md").read_text()
    assert f"](docs/page-{name}.png)" in readme
    for folder in (pictures, page_picture.DOCS):
        data = (folder / f"page-{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        size = struct.unpack(">II", data[16:24])
        desktop = (page_picture.WIDTH, page_picture.HEIGHT)
        phone = (page_picture.PHONE_WIDTH, page_picture.PHONE_HEIGHT)
        assert size == (phone if name == "phone" else desktop)
