"""The contents that an encoder has read, and the embeddings that it keeps."""

from __future__ import annotations

import os

import pytest

from inferd.backends.media import MediaContent
from inferd.backends.shared_memory import sealed_memory
from inferd.daemon.media.caches import ENCODED_MAX, EncodedItem, LruCache, MediaCaches, ReadMedia
from tests.processes import open_descriptors


def open_files() -> int:
    return len(open_descriptors())


def item(size: int = 10) -> EncodedItem:
    return EncodedItem(sealed_memory([bytes(size)]), True, size)


def test_the_values_used_last_stay() -> None:
    dropped = list[str]()
    cache = LruCache[str, str](3, dropped.append)
    for name in "abc":
        cache.put(name, name, 1)
    assert cache.find("a") == "a"
    cache.put("d", "d", 1)
    assert dropped == ["b"] and cache.find("b") is None and len(cache) == 3
    cache.put("e", "e", 3)
    assert dropped == ["b", "c", "a", "d"] and cache.weight == 3
    cache.put("f", "f", 4)
    assert cache.weight == 0 and dropped[-2:] == ["e", "f"], "heavier than all may be"


def test_embeddings_are_bounded_in_bytes_and_close_their_descriptors() -> None:
    before, caches = open_files(), MediaCaches(25)
    for digest in (b"1", b"2", b"3"):
        caches.add_encoded(1, digest, item())
    assert caches.size_bytes == 20 and caches.items == 2 and caches.find_encoded(1, b"1") is None
    found = caches.find_encoded(1, b"3")
    assert found is not None and caches.hits == 1
    copy = found.copy()
    caches.clear()
    assert os.pread(copy.fd, 100, 0) == bytes(10), "the copy outlives the cache"
    with pytest.raises(OSError):
        os.fstat(found.fd)
    copy.close()
    assert open_files() == before


def test_a_scope_finds_nothing_of_another_one() -> None:
    caches, content = MediaCaches(100), MediaContent(b"x")
    caches.add_encoded(1, b"1", item())
    caches.add_read(1, content, ReadMedia(b"", (), 0))
    assert caches.find_encoded(2, b"1") is None and caches.find_read(2, content) is None
    assert caches.find_encoded(1, b"1") is not None and caches.find_read(1, content) is not None
    assert caches.find_read(1, MediaContent(b"x", tokens_max=5)) is None
    caches.clear()


def test_as_many_descriptors_are_kept_as_the_daemon_reserves() -> None:
    before, caches = open_files(), MediaCaches(1 << 30)
    for number in range(ENCODED_MAX + 3):
        caches.add_encoded(1, b"%d" % number, item(1))
    assert caches.items == ENCODED_MAX == open_files() - before
    assert caches.find_encoded(1, b"2") is None and caches.find_encoded(1, b"3") is not None
    caches.clear()


def test_another_projector_finds_nothing_of_the_one_before() -> None:
    caches, content = MediaCaches(100), MediaContent(b"h" * 32)
    caches.use_projector("one")
    caches.add_read(1, content, ReadMedia(b"", (), 0))
    caches.add_encoded(1, b"1", item())
    caches.use_projector("one")
    assert caches.find_read(1, content) is not None
    caches.use_projector("two")
    assert caches.find_read(1, content) is None and caches.items == 0
