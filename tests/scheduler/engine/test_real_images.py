"""Images and sounds through a real projector and an engine on a tiny model: the answer is that of
mtmd's helper, also in a second turn, in another slot and behind a saved state.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inferd.backends import SamplingParams
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.media.images import decode_image
from inferd.backends.llama.media.projector import Projector
from inferd.backends.media import MarkedMedia, MediaContent, MediaItem, MediaKind
from inferd.backends.media_process import TextPiece
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.engine.tokenizing import MediaMarks, marked_tokens
from inferd.scheduler.owner import Owner
from tests.backends.llama.media.reference import Reference
from tests.backends.tiny import tiny_spec
from tests.media_samples import png, wav
from tests.scheduler.doubles import iterate_engine
from tests.tiny_projector import KINDS, write_pair

BEFORE, MARK, AFTER = "Look: ", "<|media-1|>", " What is it?"
USER, PREDICT = 1, 12


class Reader:
    """An engine with a projector, which answers its requests for embeddings."""

    def __init__(self, model: Path, mmproj: Path):
        spec = msgspec.structs.replace(tiny_spec(model), mmproj=str(mmproj))
        self.model = load_llama(spec, lambda _: True)
        self.projector = Projector(spec)
        self.engine = Engine(self.model)
        self.encoded = 0
        self._contents: dict[bytes, bytes] = {}
        self._items: dict[bytes, MediaItem] = {}

    def close(self) -> None:
        self.projector.close()
        self.engine.kv.close()
        self.model.close()

    def read(self, data: bytes) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Return the tokens of a content, and its items."""
        kind: MediaKind = "audio" if self.projector.facts.sounds else "image"
        content = MediaContent(data[-32:], kind)
        self._contents[content.sha256] = data
        tokens, items = list[int](), list[MediaItem]()
        for piece in self.projector.read(data, kind):
            if isinstance(piece, TextPiece):
                tokens += piece.tokens
                continue
            items.append(
                MediaItem.of_content(
                    content, "p", "b", index=len(items), size=piece.size, positions=piece.positions
                )
            )
            tokens += items[-1].entries()
        self._items |= {item.digest: item for item in items}
        return tokens, tuple(items)

    def answer(
        self, number: int, data: bytes, after: str = AFTER, before: str = BEFORE
    ) -> list[int]:
        """Return the tokens of a greedy answer to a prompt with a content."""
        tokens, items = self.read(data)
        marks = MediaMarks([MarkedMedia(MARK, m.pack_tokens(tokens))])
        text = (before + MARK + after).encode()
        spec = m.TaskSpec(
            id=number,
            owner=Owner(USER),
            tokens=m.pack_tokens(marked_tokens(self.model, text, True, True, marks)),
            media=items,
            sampling=SamplingParams(temp=0, ignore_eos=True),
            n_predict=PREDICT,
        )
        commands: list[m.Command] = [m.Submit(spec)]
        found = list[int]()
        while True:
            reports = iterate_engine(self.engine, commands)
            commands = []
            for report in reports:
                if isinstance(report, m.MediaWanted):
                    commands += self.embeddings(report.digests)
                elif isinstance(report, m.Tokens):
                    found += report.tokens
                assert not isinstance(report, m.Failed), report
            if any(isinstance(report, m.Finished) for report in reports):
                assert not self.engine.tasks.items
                return found

    def embeddings(self, digests: list[bytes]) -> Iterator[m.Command]:
        wanted = [self._items[digest] for digest in digests]
        content = wanted[0].content
        for number, found in enumerate(
            self.projector.encode(self._contents[content.sha256], content.kind)
        ):
            self.encoded += 1
            [item] = [
                item
                for item in self._items.values()
                if item.content == content and item.index == number
            ]
            yield m.MediaReady(item.digest, found.causal, USER, found.descriptor)


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Reader, Reference]]:
    files = write_pair(request.param, tmp_path_factory.mktemp("pair"))
    reader, reference = Reader(*files), Reference(*files)
    yield reader, reference
    reader.close()
    reference.close()


def content(reader: Reader, seed: int) -> bytes:
    return wav(2.0, seed=seed) if reader.projector.facts.sounds else png(seed=seed)


def expected(
    reference: Reference, data: bytes, after: str = AFTER, before: str = BEFORE
) -> list[int]:
    """Return the greedy answer behind a prompt that mtmd's helper computes."""
    if data[:4] == b"RIFF":
        bitmap = reference.sound(data)
    else:
        image = decode_image(data)
        bitmap = reference.image(image.width, image.height, image.tobytes())
    _, logits, past = reference.by_helper(before, bitmap, after)
    found = list[int]()
    for number in range(PREDICT):
        found.append(int(logits.argmax()))
        logits = reference.next_logits(found[-1], past + number)
    return found


def test_the_answer_about_an_image_is_that_of_mtmds_helper(pair: tuple[Reader, Reference]) -> None:
    reader, reference = pair
    one, two = content(reader, 1), content(reader, 2)
    answers = [reader.answer(1, one), reader.answer(2, two), reader.answer(3, one, " And this?")]
    assert answers[0] == expected(reference, one) and answers[1] == expected(reference, two)
    assert answers[2] == expected(reference, one, " And this?")
    encoded = reader.encoded
    assert encoded, "the embeddings were requested"
    assert reader.answer(4, one, " And this?") == answers[2]
    assert reader.encoded == encoded, "the KV state has the image"


def test_an_image_behind_another_text_is_computed_again(pair: tuple[Reader, Reference]) -> None:
    reader, reference = pair
    data, before = content(reader, 3), "Another text that stands before it: "
    found = reader.answer(11, data, before=before)
    assert found == expected(reference, data, before=before)
