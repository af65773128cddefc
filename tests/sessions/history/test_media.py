"""Images and sounds in a history: marks, items, cuts, and models that cannot read them."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from inferd.backends import SamplingParams
from inferd.backends.errors import InvalidArgument, UnsupportedOperation
from inferd.backends.media import MediaItem, items_of
from inferd.backends.params import OverflowPolicy
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Requester
from inferd.sessions.entries import HistoryEntry, TurnPiece, decode_history, encode
from inferd.sessions.history.history import History, _cut_of_whole_items
from inferd.sessions.history.media import KnownItems, content_of, joined, mark_prompt, with_media
from inferd.sessions.history.overflow import ContextLimit, TokenCut
from inferd.sessions.history.recent import RecentChats
from inferd.sessions.history.state import HistoryVocabulary
from inferd.sessions.identity import opening_of
from inferd.sessions.turn.turn import Turn
from tests.scheduler.doubles import Bench
from tests.sessions.doubles import IMAGE_SIZE, InProcessClient, Source, media_tokens
from tests.sessions.history.test_history import ChatClient, ended, ids, said, turn_on, user

pytestmark = pytest.mark.asyncio


def part(data: bytes = b"cat", kind: str = "image", tokens_max: int = 0) -> dict[str, Any]:
    """Return a part in the stored form."""
    return {
        "type": kind,
        "sha256": sha256(data).hexdigest(),
        "bytes": len(data),
        "media_type": "image/png",
        "tokens_max": tokens_max,
    }


def message(*parts: str | dict[str, Any]) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": content}]


def tokens_of(data: bytes = b"cat", projector: str = "projector") -> list[int]:
    return media_tokens(content_of(part(data)), projector).tokens


def item_of(data: bytes = b"cat") -> MediaItem:
    [item] = media_tokens(content_of(part(data))).items
    return item


async def asked(client: ChatClient, *parts: str | dict[str, Any], answer: str = "yes") -> History:
    """Return a chat of one turn with these parts in its question."""
    history = History()
    await history.add_messages(client, message(*parts))
    return history.after(turn_on(history, said(answer), ended()))


async def test_an_image_stands_among_the_tokens_where_it_stood_in_the_message() -> None:
    client = ChatClient()
    history = await asked(client, "What is", part(), "this?", "And", "that?")

    assert history.prompt == [*ids("<u>What is"), *tokens_of(), *ids("this?\nAnd\nthat?\n<a>yes")]
    assert list(history.items) == [item_of()]
    assert history.contents == {sha256(b"cat").digest()}
    assert history.messages[0]["content"][1] == part()
    await history.add_messages(client, message(part(b"dog"), part()))
    assert list(history.items) == [item_of(), item_of(b"dog"), item_of()]
    assert history.prompt[-len(ids("\n<a>")) :] == ids("\n<a>")
    assert history.recomputed.tokens == 0


async def test_text_parts_are_joined_as_llama_server_joins_them() -> None:
    parts = [{"type": "text", "text": t} if t else part() for t in ("a", "b", "", "c", "", "", "d")]

    assert joined(parts, lambda _: "@") == "a\nb@c@@d"


async def test_no_text_of_a_user_contains_a_mark() -> None:
    client, history = ChatClient(), History()
    await history.add_messages(client, message("<__media__>", part(), "<|media-0-0|>"))

    assert history.prompt == [
        *ids("<u><__media__>"),
        *tokens_of(),
        *ids("<|media-0-0|>\n<a>"),
    ]
    assert history._nonce not in str(history.messages)
    one, other = History(), History()
    for each in (one, other):
        await each.add_messages(client, message(part()))
    assert one._nonce != other._nonce


async def test_only_new_messages_are_tokenized_behind_an_image() -> None:
    client = ChatClient()
    history = await asked(client, part(), "?")
    before = list(history.prompt)
    rendered = history._rendered

    await history.add_messages(client, user("more"))

    assert history.prompt == [*before, *ids("\n<u>more\n<a>")]
    assert rendered is not None
    assert history._rendered is not None
    assert history._rendered.startswith(rendered)


async def test_a_history_is_stored_with_its_items_and_marks() -> None:
    client = ChatClient()
    history = await asked(client, part(), "?")

    stored = decode_history(encode(history.entry()))
    again = History.from_entry(stored)

    assert again.items == history.items
    assert again.contents == history.contents
    await again.add_messages(client, message(part(b"dog")))
    assert again.prompt[: len(history.prompt)] == history.prompt
    assert again.recomputed.tokens == 0


async def test_a_history_of_an_earlier_version_has_no_items() -> None:
    earlier = {"tokens": b"", "messages": user("hello"), "rendered": "<u>hello"}

    history = History.from_entry(decode_history(encode(earlier)))

    assert (history.items, history.contents, history._nonce) == ((), frozenset(), "")
    assert encode(HistoryEntry())


async def test_a_rewind_removes_an_image_whole() -> None:
    client = ChatClient()
    begin = len(ids("<u>look ")) + 1  # behind <
    for keep in range(begin, begin + IMAGE_SIZE + 2):
        history = await asked(client, "look ", part(), "now")
        history.rewind_tokens(keep)
        whole = keep >= begin + IMAGE_SIZE
        assert len(history.prompt) == (keep if whole else begin)
        assert list(history.items) == ([item_of()] if whole else [])


async def test_a_rewind_by_turns_forgets_the_image_of_the_turn() -> None:
    client = ChatClient()
    history = await asked(client, part(), "?")
    await history.add_messages(client, message(part(b"dog")))
    assert len(history.contents) == 2

    history.rewind_turns(1)

    assert list(history.items) == [item_of()]
    assert history.contents == {sha256(b"cat").digest()}
    await history.add_messages(client, message("and", part(b"dog")))
    assert list(history.items) == [item_of(), item_of(b"dog")]


@pytest.mark.parametrize("policy", [OverflowPolicy.SHIFT, OverflowPolicy.TRUNCATE])
async def test_a_cut_of_a_full_context_goes_around_items(policy: OverflowPolicy) -> None:
    client = ChatClient()
    history = History()
    prompt = ids("0123456789")
    for data in (b"cat", b"dog", b"cow"):
        prompt = [*prompt, *tokens_of(data), *ids("012345")]
    items = [item_of(data) for data in (b"cat", b"dog", b"cow")]
    history.replace_tokens(prompt, items)
    for size in range(8, len(prompt) + 2):
        for keep in range(size):
            limit = ContextLimit(policy=policy, ctx_size=size, n_keep=keep)
            fitted = history.fitted(limit)
            sizes = [size for _, size in items_of(fitted.prompt)]
            assert sizes == [IMAGE_SIZE] * len(fitted.items)
            assert fitted.prompt[-1] == prompt[-1]
            assert set(fitted.items) <= set(items)
    assert client.contents_read == []


async def test_a_cut_within_one_item_takes_it_or_leaves_it() -> None:
    entries = item_of().entries()
    middle = [1, 2, *entries, 3, 4]

    assert _cut_of_whole_items(middle, TokenCut(1, 1)) == TokenCut(1, 1)
    assert _cut_of_whole_items(middle, TokenCut(1, 3)) == TokenCut(1, 1 + IMAGE_SIZE)
    assert _cut_of_whole_items(middle, TokenCut(4, 1)) == TokenCut(2, IMAGE_SIZE)
    assert _cut_of_whole_items([1, 2, *entries], TokenCut(1, 3)) == TokenCut(1, 1)
    assert _cut_of_whole_items([1, 2, *entries], TokenCut(3, 2)) is None


async def test_an_item_that_a_context_shift_drops_is_no_longer_one_of_the_history() -> None:
    client, history = ChatClient(), History()
    await history.add_messages(client, message("look", part(), "and", part(b"dog")))
    begin, size = items_of(history.prompt)[0]
    shift = m.Shifted(1, begin - 1, size + 2)  # with < and >

    after = history.after(turn_on(history, said("one"), shift, said("two"), ended()))

    assert after.items == (item_of(b"dog"),)
    assert after.contents == {sha256(b"cat").digest(), sha256(b"dog").digest()}, (
        "messages have both"
    )
    await after.add_messages(client, user("go on"))
    assert after.items == (item_of(b"dog"),)


async def test_a_turn_that_continues_in_another_worker_has_the_items_that_are_left() -> None:
    client, history = ChatClient(), History()
    await history.add_messages(client, message("look", part(), "and", part(b"dog")))
    begin, size = items_of(history.prompt)[0]
    spec = m.TaskSpec(
        id=1,
        owner=Owner(1),
        tokens=m.pack_tokens(history.prompt),
        sampling=SamplingParams(),
        media=history.items,
    )
    turn = Turn(client, spec, lambda _: None)
    turn.report(said("one"))
    whole = turn.continue_on(client)
    turn.report(m.Shifted(1, begin - 1, size + 2))

    shifted = turn.continue_on(client)

    assert whole is not None
    assert whole.media == history.items
    assert shifted is not None
    assert shifted.media == (item_of(b"dog"),)


async def test_dropped_turns_take_their_images_with_them() -> None:
    client = ChatClient()
    history = await asked(client, part(), "?")
    for number in range(3):
        await history.add_messages(client, message(part(b"%d" % number), "?"))
        history = history.after(turn_on(history, said("yes"), ended()))
    limit = ContextLimit(policy=OverflowPolicy.DROP_TURNS, ctx_size=60)

    await history.add_messages(client, user("last"), limit=limit)

    assert history.dropped.turns > 0
    assert item_of() not in history.items
    assert history.items[-1] == item_of(b"2")
    assert sha256(b"cat").digest() in history.contents, "the user still sees it"


async def test_a_model_that_reads_no_images_gets_texts_in_place_of_old_ones() -> None:
    client = ChatClient()
    history = await asked(client, "What is", part(), "this", part(b"moo", "audio"))
    client.reads = ("audio",)

    await history.add_messages(client, user("and?"))

    sound = media_tokens(content_of(part(b"moo", "audio")))
    assert history.prompt == [
        *ids("<u>What is[image]this"),
        *sound.tokens,
        *ids("\n<a>yes\n<u>and?\n<a>"),
    ]
    assert history.unread.startswith("1 of the history's images and sounds are texts: no image")
    assert history.items == sound.items
    assert history.messages[0]["content"][1] == part(), "the user still sees it"
    client.reads = ("image", "audio")
    history = history.after(turn_on(history, said("ok"), ended()))
    await history.add_messages(client, user("again?"))
    assert (len(history.items), history.unread) == (2, "")


async def test_a_new_image_that_the_model_cannot_read_is_refused_with_its_number() -> None:
    client = ChatClient()
    history = await asked(client, part(), "?")
    client.reads = ("image",)

    with pytest.raises(UnsupportedOperation) as refused:
        await history.add_messages(client, message(part(), "?", part(b"moo", "audio")))

    assert refused.value.data == {"item": 1}


async def test_histories_with_unreadable_images_can_be_refused() -> None:
    client = ChatClient()
    history = await asked(client, part(), "?")
    client.reads = ()

    with pytest.raises(UnsupportedOperation, match="cannot read the images"):
        await history.add_messages(client, user("more"), refuses_unread=True)
    with pytest.raises(UnsupportedOperation, match="cannot read the images"):
        await history.retokenize(client, b"", refuses_unread=True)


async def test_another_model_reads_the_images_of_the_messages_anew() -> None:
    client, other = ChatClient(), ChatClient()
    other.projector = "another"
    history = await asked(client, "look", part())

    await history.retokenize(other, b"")

    answer = await other.tokenize(b"yes", special=True, bos=False)
    assert history.prompt == [
        *ids("<u>look"),
        *tokens_of(projector="another"),
        *ids("\n<a>"),
        *answer,
    ]
    [item] = history.items
    assert (item.content, item == item_of()) == (content_of(part()), False)


async def test_raw_text_has_notes_on_its_images_for_another_model() -> None:
    client, new = InProcessClient(Bench()), InProcessClient(Bench())
    prompt = await mark_prompt(client, [b"see ", part(), b" or ", part(b"moo", "audio"), b"!"])
    history = History()
    tokens = await client.tokenize(prompt.text, special=True, bos=True, media=prompt.media)
    history.replace_tokens(tokens, prompt.items)
    vocabulary = HistoryVocabulary(vocab_hash=client.info.vocab_hash)
    source = Source(new)
    source.old = client

    with pytest.raises(UnsupportedOperation):
        await vocabulary.retokenize(
            source, new, history.copy(), Requester(Owner(0)), refuses_unread=True
        )
    await vocabulary.retokenize(source, new, history, Requester(Owner(0)))

    expected = b"see <[image]> or <[sound]>!"
    assert history.prompt == await new.tokenize(expected, special=True, bos=True)
    assert (history.items, history.contents) == ((), frozenset())
    assert history.unread


async def test_a_raw_prompt_may_have_images_between_its_texts() -> None:
    client = InProcessClient(Bench())

    prompt = await mark_prompt(client, [b"a", part(), b"b", part(b"dog")])
    tokens = await client.tokenize(prompt.text, special=False, bos=False, media=prompt.media)

    assert tokens == [ord("a"), *tokens_of(), ord("b"), *tokens_of(b"dog")]
    assert prompt.items == [item_of(), item_of(b"dog")]
    assert (await mark_prompt(client, b"text")).text == b"text"
    assert (await mark_prompt(client, [b"te", b"xt"])).text == b"text"


async def test_messages_without_a_history_are_marked_alike() -> None:
    client = ChatClient()

    messages, media = await with_media(client, [*message("see", part()), *user("plain")])

    [one] = media
    assert messages == [*user(f"see{one.mark}"), *user("plain")]


def colliding_items() -> tuple[MediaItem, MediaItem]:
    """Return two items with the same single entry of 30 bits, as a user may find them."""
    seen: dict[int, MediaItem] = {}
    for number in range(1 << 20):
        item = MediaItem(number.to_bytes(32, "big"), 1)
        other = seen.setdefault(item.entries()[0], item)
        if other is not item:
            return other, item
    raise AssertionError("a million numbers of 30 bits are different")


async def test_a_short_item_that_looks_like_another_one_is_refused() -> None:
    one, other = colliding_items()

    assert KnownItems((one, one)).items_in([*one.entries(), 5]) == (one,)
    with pytest.raises(InvalidArgument, match="cannot be distinguished"):
        KnownItems((one, other))


async def test_a_recent_chat_with_an_image_is_continued() -> None:
    client, recent, owner = ChatClient(), RecentChats(), Owner(1)
    history = History()
    sent = message("What is", part())
    await history.add_messages(client, sent)
    turn = turn_on(history, said("a cat"), ended())
    piece = TurnPiece(tokens=m.pack_tokens(turn.tokens), text=bytes(turn.text))
    recent.add(owner, "model", sent, history, piece)
    answered = {"role": "assistant", "content": "a cat"}

    other = message("What is", part(b"dog"))
    assert recent.find(owner, "model", [*other, answered, *user("?")]) is None
    found = recent.find(owner, "model", [*sent, answered, *user("and?")])

    assert found is not None
    continued, known = found
    assert known == 2
    assert continued.items == (item_of(),)


async def test_the_title_of_a_chat_that_begins_with_an_image_is_its_text() -> None:
    assert opening_of(message(part(), "What is this?")) == "What is this?"
    assert opening_of(message(part())) == ""


async def test_an_image_that_the_model_reads_in_another_way_now_is_computed_again() -> None:
    client = ChatClient()
    history = await asked(client, "look", part())
    client.projector = "another"

    await history.add_messages(client, user("and?"))

    assert history.prompt == [
        *ids("<u>look"),
        *tokens_of(projector="another"),
        *ids("\n<a>yes\n<u>and?\n<a>"),
    ]
    assert history.recomputed.why.startswith("the model reads the images")
