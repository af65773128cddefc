"""Images and sounds in requests of all APIs, on an echo model that reads them."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from inferd import Audio, Client
from inferd.gateways.http.limits import BODIES_BYTES_MAX, MEDIA_BYTES_MAX
from inferd.gateways.http.media import in_sealed_memory
from inferd.ipc.chat_messages import MEDIA_PARTS_MAX
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway, keyed_gateway
from tests.pictures import png, wav

CONFIG = (
    echo_model("echo")
    + echo_model("eyes", media=True, **{"ctx-size": 8192})
    + "".join(
        echo_model(f"{name}-{number}", media=name != "blind", load_ms=600)
        for name in ("far", "near", "blind")
        for number in (0, 2)
    )
)
PICTURE = png(8, 8, padding=640)
ENTRIES = 1 + len(PICTURE) // 64
"""The tokens that the echo model's double gives the picture."""
OTHER = png(9, 9, (0, 90, 0), padding=900)
TEXT = "look"
API_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")


def base64_of(data: bytes) -> str:
    return b64encode(data).decode()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(data)}"


def openai_part(data: bytes = PICTURE, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data), **more}}


def block(data: bytes = PICTURE) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(data)}
    return {"type": "image", "source": source}


def users(*content: Any) -> list[Any]:
    return [{"role": "user", "content": [*content]}]


def text_part(text: str = TEXT) -> dict[str, Any]:
    return {"type": "text", "text": text}


def body_of(path: str, image: str, **more: Any) -> dict[str, Any]:
    """Return a request with an image in base64, in the form of a path."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": users(
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
            )
        },
        "/v1/responses": {
            "input": users({"type": "input_image", "image_url": f"data:image/png;base64,{image}"})
        },
        "/v1/messages": {
            "messages": users(
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": image},
                }
            ),
            "max_tokens": 50,
        },
        "/api/chat": {"messages": [{"role": "user", "content": "", "images": [image]}]},
        "/api/generate": {"prompt": "", "images": [image]},
    }
    return {"model": "eyes", "stream": False} | bodies[path] | more


PLACES = dict(zip(API_PATHS, ("messages.0.content.0", "input.0.content.0", "messages.0.content.0",
                              "messages.0.images.0", "images.0"), strict=True))  # fmt: skip


def error_of(reply: httpx.Response) -> tuple[str, str]:
    """Return the message of an error and the field that it names, in any API's form."""
    error = reply.json()["error"]
    if isinstance(error, str):
        return error, ""
    return error["message"], error.get("param") or ""


@pytest.fixture(scope="module")
def claude(http: RunningGateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=http.url, api_key="none", timeout=CALL_S_MAX, max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def llama(http: RunningGateway) -> Iterator[ollama.Client]:
    with ollama.Client(host=http.url, timeout=CALL_S_MAX) as client:
        yield client


def prompt_tokens(api: openai.OpenAI, *content: Any) -> int:
    done = api.chat.completions.create(model="eyes", messages=users(*content))
    assert done.usage is not None
    return done.usage.prompt_tokens


def test_openais_client_sends_an_image(api: openai.OpenAI) -> None:
    content = (text_part(), openai_part(detail="high"))
    done = api.chat.completions.create(model="eyes", messages=users(*content))
    assert TEXT in (done.choices[0].message.content or "")
    assert done.usage is not None
    assert done.usage.prompt_tokens == prompt_tokens(api, text_part()) + ENTRIES
    chunks = [
        *api.chat.completions.create(
            model="eyes",
            messages=users(*content),
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == done.usage.prompt_tokens
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        done.choices[0].message.content
    )


def test_an_image_may_be_a_text_beside_its_detail(api: openai.OpenAI) -> None:
    part: Any = {"type": "image_url", "image_url": uri(PICTURE)}
    assert prompt_tokens(api, text_part(), part) == prompt_tokens(api, text_part()) + ENTRIES


def test_low_detail_gives_an_image_fewer_tokens(api: openai.OpenAI) -> None:
    large = png(8, 8, padding=40_000)
    few = prompt_tokens(api, openai_part(large, detail="low"))
    many = prompt_tokens(api, openai_part(large, detail="high"))
    assert 1 + len(large) // 64 <= many and many - few == 1 + len(large) // 64 - 256


def test_openais_client_sends_a_sound(api: openai.OpenAI) -> None:
    sound = wav(0.2)
    part: Any = {
        "type": "input_audio",
        "input_audio": {"data": base64_of(sound), "format": "wav"},
    }
    assert prompt_tokens(api, text_part(), part) == (
        prompt_tokens(api, text_part()) + 1 + len(sound) // 64
    )


def test_another_question_about_an_image_computes_only_the_question(api: openai.OpenAI) -> None:
    image = png(8, 8, (1, 2, 3), padding=3000)

    def ask(question: str) -> tuple[int, int]:
        messages = users(openai_part(image), text_part(question))
        usage = api.chat.completions.create(model="eyes", messages=messages).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    assert ask("first question")[1] <= 1
    tokens, cached = ask("second one")
    assert 1 + len(image) // 64 <= cached < tokens


def test_several_answers_are_about_one_image(api: openai.OpenAI) -> None:
    done = api.chat.completions.create(
        model="eyes", messages=users(text_part(), openai_part()), n=3
    )
    assert len({choice.message.content for choice in done.choices}) == 1
    assert len(done.choices) == 3 and done.usage is not None
    assert done.usage.prompt_tokens == prompt_tokens(api, text_part(), openai_part())


def test_several_streamed_answers_are_about_one_large_image(api: openai.OpenAI) -> None:
    parts = (text_part(), openai_part(png(8, 8, padding=1 << 20), detail="low"), openai_part())
    expected = api.chat.completions.create(model="eyes", messages=users(*parts))
    chunks = api.chat.completions.create(
        model="eyes",
        messages=users(*parts),
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, usage = ["", "", ""], None
    for chunk in chunks:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [expected.choices[0].message.content] * 3
    assert usage is not None and expected.usage is not None
    assert usage.prompt_tokens == expected.usage.prompt_tokens


def sealed_memories() -> set[int]:
    """Return the inodes of the sealed memories that this process holds."""
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            if os.readlink(f"/proc/self/fd/{each}").startswith("/memfd:inferd"):
                found.add(os.fstat(int(each)).st_ino)
    return found


@pytest.mark.asyncio
async def test_turns_of_one_prompt_share_the_memory_of_a_large_image() -> None:
    large, alt = png(8, 8, padding=1 << 20), "a dot"
    image = {"type": "image", "data": large, "detail": "low", "alt": alt}
    sound = {"type": "audio", "data": wav(10)}
    short: Any = [text_part(), {"type": "image", "data": PICTURE}]
    messages: list[Any] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [*short, image]},
        {"role": "user", "content": [sound]},
    ]
    before = sealed_memories()  # of objects of other tests
    async with in_sealed_memory(messages) as shared:
        assert isinstance(shared, list)
        [system, user, last] = shared
        assert isinstance(user, dict) and isinstance(last, dict) and system == messages[0]
        assert user["content"][:2] == short
        sealed, [heard] = user["content"][2], last["content"]
        assert sealed.fields() == {"type": "image", "detail": "low", "alt": alt}
        assert isinstance(heard, Audio)
        first, second = sealed.open(), sealed.open()
        nodes = {os.fstat(each.descriptor).st_ino for each in (first, second)}
        assert len(nodes) == 1, "one memory"
        for each in (first, second):
            assert os.pread(each.descriptor, len(large) + 1, 0) == large
            os.close(each.descriptor)
        assert len(sealed_memories() - before) == 2
    assert sealed_memories() <= before
    async with in_sealed_memory("text") as prompt:
        assert prompt == "text"


def test_a_response_has_an_image_and_is_continued(api: openai.OpenAI) -> None:
    part: Any = {"type": "input_image", "image_url": uri(PICTURE), "detail": "auto"}
    items = users({"type": "input_text", "text": TEXT}, part)
    count = api.responses.input_tokens.count(model="eyes", input=items)
    done = api.responses.create(model="eyes", input=items)
    assert done.usage is not None and done.usage.input_tokens == count.input_tokens > ENTRIES
    keywords: Any = {"model": "eyes", "previous_response_id": done.id, "input": "more"}
    count = api.responses.input_tokens.count(**keywords)
    more = api.responses.create(**keywords)
    assert more.usage is not None
    assert more.usage.input_tokens == count.input_tokens


def test_the_items_of_an_input_have_their_images_if_requested(
    api: openai.OpenAI, web: httpx.Client
) -> None:
    """As those of OpenAI, whose clients can then send them again."""
    large = png(8, 8, padding=(1 << 20) + 1)  # more than one part of a response
    images: list[Any] = [
        {"type": "input_image", "image_url": uri(PICTURE), "detail": "low"},
        {"type": "input_text", "text": "1234"},
        {"type": "input_image", "image_url": uri(large), "detail": "auto"},
    ]
    call: Any = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "a", "output": [images[0]]}
    done = api.responses.create(model="eyes", input=[*users(*images), call, output])
    named: Any = [*api.responses.input_items.list(done.id, order="asc")]
    assert [each.type for each in named] == ["message", "function_call", "function_call_output"]
    assert [each.type for each in named[0].content] == [each["type"] for each in images]
    shown = named[0].content[0]
    assert (shown.image_url, shown.detail) == (None, "low")
    assert shown.sha256 == hashlib.sha256(PICTURE).hexdigest()
    items: Any = [
        *api.responses.input_items.list(
            done.id, order="asc", include=["message.input_image.image_url"]
        )
    ]
    for each, image in zip(items[0].content, images, strict=True):
        assert each.to_dict().items() >= image.items()
    assert items[2].output[0].image_url == uri(PICTURE)
    again: Any = [item.to_dict(exclude_none=True) for item in items]
    counts = [
        api.responses.input_tokens.count(model="eyes", input=each).input_tokens
        for each in (again, [*users(*images), call, output])
    ]
    assert counts[0] == counts[1] > ENTRIES
    path = f"/v1/responses/{done.id}/input_items?limit=1&order=asc"
    whole = web.get(f"{path}&include=x&include=message.input_image.image_url")
    assert whole.json()["data"][0]["content"][2]["image_url"] == uri(large)
    assert not web.head(f"{path}&include[]=message.input_image.image_url").content


def test_a_functions_result_has_an_image(api: openai.OpenAI) -> None:
    call: Any = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    image: Any = {"type": "input_image", "image_url": uri(PICTURE)}
    output: Any = {"type": "function_call_output", "call_id": "a", "output": [image]}
    done = api.responses.create(model="eyes", input=[*users(text_part()), call, output])
    assert done.usage is not None and done.usage.input_tokens > ENTRIES


def test_anthropics_client_sends_an_image(claude: anthropic.Anthropic) -> None:
    messages: Any = users(block(), text_part())
    count = claude.messages.count_tokens(model="eyes", messages=messages).input_tokens
    done = claude.messages.create(model="eyes", max_tokens=50, messages=messages)
    assert done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0) == count > ENTRIES
    assert TEXT in done.content[0].text  # type: ignore[union-attr]
    with claude.messages.stream(model="eyes", max_tokens=50, messages=messages) as stream:
        assert TEXT in stream.get_final_text()


def test_a_tool_result_has_an_image_before_one_of_its_message(
    claude: anthropic.Anthropic, web: httpx.Client
) -> None:
    """The daemon gets the result first; an error names the place in the request."""
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block(OTHER), text_part()]}
    messages: Any = [
        *users(text_part()),
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [block(), result]},
    ]
    count = claude.messages.count_tokens(model="eyes", messages=messages).input_tokens
    assert count > ENTRIES, "the echo model reads the last message"
    only = [*messages[:2], {"role": "user", "content": [result]}]
    count = claude.messages.count_tokens(model="eyes", messages=only).input_tokens
    assert count > len(OTHER) // 64
    result["content"][0] = block(b"%PDF-1.7 and more")  # type: ignore[index]
    body = {"model": "eyes", "max_tokens": 9, "messages": messages}
    reply = web.post("/v1/messages", json=body)
    assert reply.status_code == 400
    assert "messages.2.content.1.content.0" in error_of(reply)[0]


def test_ollamas_client_sends_images(llama: ollama.Client) -> None:
    plain = llama.chat("eyes", [{"role": "user", "content": TEXT}])
    done = llama.chat(
        "eyes", [{"role": "user", "content": TEXT, "images": [PICTURE, base64_of(OTHER)]}]
    )
    assert TEXT in (done.message.content or "")
    assert plain.prompt_eval_count is not None
    assert done.prompt_eval_count == (plain.prompt_eval_count + ENTRIES + 1 + len(OTHER) // 64)
    made = llama.generate("eyes", TEXT, images=[PICTURE])
    assert made.prompt_eval_count == plain.prompt_eval_count + ENTRIES


def test_ollama_lists_what_a_model_reads(llama: ollama.Client, web: httpx.Client) -> None:
    assert {"vision", "audio"} <= set(llama.show("eyes").capabilities or ())
    assert not {"vision", "audio"} & set(llama.show("echo").capabilities or ())
    models = {each["id"]: each["reads"] for each in web.get("/v1/inferd/models").json()["data"]}
    assert models["echo"] == ["text"] and "image" in models["eyes"]


ELSEWHERE = ("https://example.org/a.png", "http://127.0.0.1:1/", "file:///etc/passwd", "/a.png")


@pytest.mark.parametrize("url", ELSEWHERE)
def test_an_image_elsewhere_is_not_fetched(web: httpx.Client, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    reply = web.post("/v1/chat/completions", json={"model": "eyes", "messages": users(part)})
    message, param = error_of(reply)
    assert (reply.status_code, param) == (400, "messages.0.content.0")
    assert url in message and "data:image/png;base64," in message
    item = {"type": "input_image", "image_url": url}
    reply = web.post("/v1/responses", json={"model": "eyes", "input": users(item)})
    assert (reply.status_code, error_of(reply)[1]) == (400, "input.0.content.0")
    source = {"type": "url", "url": url}
    body = {"messages": users({"type": "image", "source": source}), "max_tokens": 9}
    reply = web.post("/v1/messages", json={"model": "eyes", **body})
    assert reply.status_code == 400 and "base64" in error_of(reply)[0]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": 1}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "image_url", "image_url": {"url": "data:image/png,abc"}},
        {"type": "image_url", "image_url": {"url": "data:text/html;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "data:" + "x" * 5000}},
        {"type": "image_url", "image_url": {"url": uri(PICTURE), "detail": "huge"}},
        {"type": "image_url", "image_url": {"url": uri(b"%PDF-1.7 and more")}},
        {"type": "input_audio"},
        {"type": "input_audio", "input_audio": {"data": "AAAA"}},
        {"type": "input_audio", "input_audio": {"data": uri(wav(0.1)), "format": "wav"}},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}},
        {"type": "input_file", "file_data": "AAAA"},
    ],
    ids=lambda part: json.dumps(part)[:70],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_part_that_cannot_be_read_is_refused_by_its_place(
    web: httpx.Client, part: dict[str, Any], stream: bool
) -> None:
    messages = [{"role": "system", "content": "s"}, *users(text_part(), part)]
    body = {"model": "eyes", "messages": messages, "stream": stream}
    reply = web.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert error_of(reply)[1] == "messages.1.content.1"


GARBAGE = ("AAA", "AA=A", "A===", "AAAA====", "AA AA", "AAA\n", "%41AA", "_-_-", "ä" * 4)


@pytest.mark.parametrize("path", API_PATHS)
def test_what_is_not_base64_is_refused_by_its_place(web: httpx.Client, path: str) -> None:
    for text in (*GARBAGE, base64_of(PICTURE)[:-4] + "A" * (3 << 20) + "!" * 4):
        reply = web.post(path, json=body_of(path, text))
        message, param = error_of(reply)
        assert reply.status_code == 400 and "base64" in message, (text[:20], message)
        assert PLACES[path] in message and param in ("", PLACES[path])


@pytest.mark.parametrize("path", API_PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_a_projector_refuses_images(
    web: httpx.Client, path: str, stream: bool
) -> None:
    body = body_of(path, base64_of(PICTURE), model="echo", stream=stream)
    reply = web.post(path, json=body)
    assert reply.status_code == 400, reply.text
    message, param = error_of(reply)
    assert param in ("", PLACES[path]) and "image" in message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_that_waits_for_its_model_is_checked_before(web: httpx.Client, path: str) -> None:
    """By the gateway itself, which then begins the response."""
    number = API_PATHS.index(path)
    pdf = base64_of(b"%PDF-1.7 and more")
    for model, image in ((f"far-{number}", pdf), (f"blind-{number}", base64_of(PICTURE))):
        reply = web.post(path, json=body_of(path, image, model=model, stream=True))
        assert reply.status_code == 400, reply.text
        assert error_of(reply)[1] in ("", PLACES[path])
    body = body_of(path, base64_of(PICTURE), model=f"near-{number}", stream=True)
    body["messages"][0]["content"].append(text_part())
    reply = web.post(path, json=body)
    assert reply.status_code == 200 and '"error"' not in reply.text


@pytest.mark.parametrize("path", API_PATHS)
def test_too_many_images_are_refused_before_they_are_decoded(web: httpx.Client, path: str) -> None:
    for count in (MEDIA_PARTS_MAX + 1, 300):
        body = body_of(path, "!" * 1000)  # is not even base64
        for field in ("messages", "input", "images"):
            if field == "images" and field in body:
                body["images"] *= count
            elif field in body:
                [message] = body[field]
                part = "images" if "images" in message else "content"
                message[part] *= count
        reply = web.post(path, json=body)
        assert reply.status_code == 413
        assert f"more than {MEDIA_PARTS_MAX}" in error_of(reply)[0]


def test_a_raw_prompt_has_no_images(web: httpx.Client) -> None:
    body = body_of("/api/generate", base64_of(PICTURE), raw=True, prompt="x")
    reply = web.post("/api/generate", json=body)
    assert reply.status_code == 400 and "raw" in error_of(reply)[0]


def test_a_large_image_is_sent(web: httpx.Client, api: openai.OpenAI) -> None:
    """It goes to the daemon beside the frame of the request."""
    large = png(8, 8, padding=9 << 20)
    assert prompt_tokens(api, openai_part(large)) > 4096
    reply = web.post("/v1/chat/completions", content=iter([_bytes_with(large)]))
    assert reply.status_code == 200, "its length was not announced"


def _bytes_with(data: bytes) -> bytes:
    body = {"model": "eyes", "messages": users(openai_part(data)), "max_tokens": 1}
    return json.dumps(body).encode()


def test_a_request_with_too_many_values_is_refused(web: httpx.Client) -> None:
    """They would take the event loop from others."""
    content = b'{"model":"eyes","messages":[' + b"{}," * (5 << 20) + b"{}]}"
    reply = web.post("/v1/chat/completions", content=content)
    assert reply.status_code == 413 and "commas" in error_of(reply)[0]


def test_many_clients_send_images_at_once(http: RunningGateway) -> None:
    picture = png(8, 8, padding=2 << 20)

    def ask(number: int) -> int:
        with httpx.Client(base_url=http.url, timeout=CALL_S_MAX) as client:
            body = json.loads(_bytes_with(picture))
            body["messages"][0]["content"].append(text_part(str(number)))
            return client.post("/v1/chat/completions", json=body).status_code

    with ThreadPoolExecutor(50) as threads:
        assert set(threads.map(ask, range(50))) == {200}


def test_clients_that_vanish_while_they_send_leave_no_memory_taken(
    http: RunningGateway, api: openai.OpenAI
) -> None:
    """As many as have all memory for long requests, twice."""
    for _ in range(8):
        with stalled_upload(http, 60 << 20) as sock:
            sock.sendall(b'"model":"eyes","messages":[' + b" " * (1 << 20))
    began = time.monotonic()
    assert prompt_tokens(api, openai_part(png(8, 8, padding=2 << 20)))
    assert time.monotonic() - began < CALL_S_MAX / 2


def stalled_upload(http: RunningGateway, size: int) -> socket.socket:
    """Return a connection with a request of which only the beginning arrives."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    sock = socket.create_connection((http.host, http.port))
    sock.sendall(head.encode() + b"{")
    return sock


def test_images_of_a_stored_response_are_read_in_the_memory_of_long_requests(
    daemon: RunningDaemon,
) -> None:
    """They are counted with the new input, and wait for memory as long requests do. Contents that
    are sent to a client in parts need none.
    """
    image: Any = {"type": "input_image", "image_url": uri(png(8, 8, padding=2 << 20))}
    with ExitStack() as stack:
        http = stack.enter_context(gateway(daemon, "--queue-timeout", "0.5"))
        web = stack.enter_context(httpx.Client(base_url=http.url, timeout=CALL_S_MAX))
        body = {"model": "eyes", "input": users(image)}
        stored = web.post("/v1/responses", json=body).json()["id"]
        count = {"model": "eyes", "previous_response_id": stored, "input": "more"}

        def status(response: httpx.Response) -> int:
            if response.status_code == 503:
                assert "no memory for another long request" in response.text
            return response.status_code

        assert status(web.post("/v1/responses/input_tokens", json=count)) == 200
        with ExitStack() as uploads:
            for _ in range(BODIES_BYTES_MAX // MEDIA_BYTES_MAX):
                uploads.enter_context(stalled_upload(http, MEDIA_BYTES_MAX))
            until = time.monotonic() + CALL_S_MAX
            while status(web.post("/v1/responses", json=body)) == 200:
                assert time.monotonic() < until, "the uploads take no memory"
            assert status(web.post("/v1/responses/input_tokens", json=count)) == 503
            include = "message.input_image.image_url"
            items = web.get(f"/v1/responses/{stored}/input_items?include={include}").json()
            [shown] = items["data"][0]["content"]
            assert shown["image_url"] == image["image_url"]
            assert web.get(MEDIA.format(stored, shown["sha256"])).status_code == 200
        until = time.monotonic() + CALL_S_MAX
        while status(web.post("/v1/responses/input_tokens", json=count)) == 503:
            assert time.monotonic() < until, "the memory is not given back"


MEDIA = "/v1/inferd/sessions/{}/media/{}"


def resident_bytes(http: RunningGateway) -> int:
    pages = Path(f"/proc/{http.process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def begun_download(http: RunningGateway, path: str) -> socket.socket:
    """Return a connection of which only the beginning of the response is read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(CALL_S_MAX)
    sock.connect((http.host, http.port))
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert sock.recv(12) == b"HTTP/1.1 200"
    return sock


def test_clients_that_do_not_read_an_image_take_little_memory(
    http: RunningGateway, web: httpx.Client
) -> None:
    """Their downloads end when the session is deleted, and clients notice it."""
    large = png(8, 8, padding=12 << 20)
    body = {"model": "eyes", "session_id": "slow", "messages": users(openai_part(large))}
    assert web.post("/v1/chat/completions", json=body).is_success
    path = MEDIA.format("slow", hashlib.sha256(large).hexdigest())
    head = web.head(path)
    assert int(head.headers["content-length"]) == len(large) and not head.content
    assert web.get(path).content == large
    before = resident_bytes(http)
    readers = 24
    with ExitStack() as stack:
        downloads = [stack.enter_context(begun_download(http, path)) for _ in range(readers)]
        assert resident_bytes(http) - before < readers * len(large) / 4
        assert web.delete("/v1/inferd/sessions/slow").is_success
        received = 0
        while part := downloads[0].recv(1 << 20):
            received += len(part)
        assert received < len(large)


def test_an_image_of_a_session_is_read_again(web: httpx.Client, client: Client) -> None:
    body = {"model": "eyes", "session_id": "album", "max_tokens": 5}
    messages = users({**openai_part(), "alt": "a red square"}, text_part())
    assert web.post("/v1/chat/completions", json={**body, "messages": messages}).is_success
    [part, text] = web.get("/v1/inferd/sessions/album").json()["messages"][0]["content"]
    assert text == text_part()
    assert (part["type"], part["bytes"], part["alt"]) == ("image", len(PICTURE), "a red square")
    reply = web.get(MEDIA.format("album", part["sha256"]))
    assert (reply.status_code, reply.content) == (200, PICTURE)
    assert reply.headers["content-type"] == "image/png"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in reply.headers["content-security-policy"]
    assert reply.headers["cache-control"] == "no-store"
    with ThreadPoolExecutor(20) as threads:
        path = MEDIA.format("album", part["sha256"])
        assert {each.content for each in threads.map(web.get, [path] * 40)} == {PICTURE}
    other = "0" * 64
    for session, sha256 in (("album", other), ("none", part["sha256"]), ("album", "../x")):
        assert web.get(MEDIA.format(session, sha256)).status_code == 404
    assert web.delete("/v1/inferd/sessions/album").is_success
    assert web.get(MEDIA.format("album", part["sha256"])).status_code == 404


def test_another_caller_cannot_read_an_image(
    daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("keys")
    with keyed_gateway(daemon, folder, ("ada", "bob")) as (running, keys):
        clients = {
            name: httpx.Client(
                base_url=running.url,
                headers={"authorization": f"Bearer {key}"},
                timeout=CALL_S_MAX,
            )
            for name, key in keys.items()
        }
        ada, bob = clients["ada"], clients["bob"]
        body = {"model": "eyes", "session_id": "mine", "messages": users(openai_part())}
        assert ada.post("/v1/chat/completions", json=body).is_success
        [message, _] = ada.get("/v1/inferd/sessions/mine").json()["messages"]
        path = MEDIA.format("mine", message["content"][0]["sha256"])
        assert ada.get(path).content == PICTURE
        hidden = bob.get(path)
        assert hidden.status_code == 404
        body["messages"] = users(openai_part(OTHER))
        assert bob.post("/v1/chat/completions", json=body).is_success
        unknown = bob.get(MEDIA.format("mine", "0" * 64))
        assert (bob.get(path).status_code, bob.get(path).text) == (404, unknown.text)
        for each in clients.values():
            each.close()
