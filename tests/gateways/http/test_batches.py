"""OpenAI's Batch API and responses in the background, with OpenAI's own client."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from inferd import Client
from inferd.backends.errors import InvalidArgument
from inferd.gateways.http.callers import new_key
from inferd.gateways.http.multipart import FormReader
from inferd.gateways.http.openai.batches import window_s
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway
from tests.waiting import wait_until

CONFIG = echo_model("echo", slots=4) + echo_model("slow", slots=1, step_ms=10)
LONG = "a text that is repeated slowly " * 60


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG) as running:
        yield running


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def chat(name: str, model: str = "echo", text: str = "") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text or f"hello {name}"}]}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def upload(api: openai.OpenAI, *lines: dict[str, Any]) -> Any:
    return api.files.create(file=("requests.jsonl", jsonl(*lines)), purpose="batch")


def batch_of(api: openai.OpenAI, *lines: dict[str, Any], **keywords: Any) -> Any:
    return api.batches.create(
        input_file_id=upload(api, *lines).id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        **keywords,
    )


def ended(api: openai.OpenAI, batch_id: str) -> Any:
    def poll() -> Any:
        found = api.batches.retrieve(batch_id)
        return found if found.status != "in_progress" else None

    return wait_until(poll)


def test_a_batch_goes_from_a_file_to_its_results(api: openai.OpenAI) -> None:
    file = upload(api, *(chat(f"r{n}") for n in range(10)), chat("bad", "missing"))
    assert (file.purpose, file.filename, file.status) == ("batch", "requests.jsonl", "processed")
    batch = api.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"night": "1"},
    )
    done = ended(api, batch.id)
    assert (done.status, done.completion_window) == ("completed", "24h")
    assert done.request_counts.model_dump() == {"total": 11, "completed": 10, "failed": 1}
    assert done.metadata == {"night": "1"}
    results = [
        json.loads(line) for line in api.files.content(done.output_file_id).text.splitlines()
    ]
    texts = {
        r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in results
    }
    assert texts == {f"r{n}": f"hello r{n}" for n in range(10)}
    [error] = map(json.loads, api.files.content(done.error_file_id).text.splitlines())
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 404)
    assert batch.id in [found.id for found in api.batches.list(limit=5)]
    assert {f.id for f in api.files.list(purpose="batch_output")} >= {
        done.output_file_id,
        done.error_file_id,
    }
    assert api.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert api.files.content(file.id).content.count(b"\n") == 11
    assert api.files.delete(file.id).deleted
    assert api.files.delete(done.output_file_id).deleted  # the batch, with its results
    for deleted in (file.id, done.error_file_id):
        with pytest.raises(openai.NotFoundError):
            api.files.retrieve(deleted)
    with pytest.raises(openai.NotFoundError):
        api.batches.retrieve(batch.id)


def test_lists_are_read_in_pages(api: openai.OpenAI) -> None:
    ids = [batch_of(api, chat("r")).id for _ in range(3)]
    first = api.batches.list(limit=2)
    assert [found.id for found in first.data] == ids[:0:-1]
    assert first.has_more
    assert [found.id for found in api.batches.list(limit=2)][:3] == ids[::-1]
    with pytest.raises(openai.NotFoundError):
        api.batches.list(after="batch_none")


def test_a_batch_is_cancelled(api: openai.OpenAI) -> None:
    batch = batch_of(api, *(chat(f"r{n}", "slow", LONG) for n in range(20)))
    cancelled = api.batches.cancel(batch.id)
    assert cancelled.status == "cancelled"
    assert api.batches.retrieve(batch.id).cancelled_at is not None


@pytest.mark.parametrize(
    ("data", "fields", "param"),
    [
        (b"no json\n", {}, "line 1 of the file is not a request"),
        (jsonl(chat("a"), chat("a")), {}, "line 2 of the file has the custom_id"),
        (jsonl({**chat("a"), "url": "/v1/embeddings"}), {}, "the job's endpoint"),
        (jsonl(chat("a")), {"endpoint": "/v1/moderations"}, "there is no endpoint"),
        (jsonl(chat("a")), {"completion_window": "soon"}, "is not in hours or days"),
        (jsonl(chat("a")), {"input_file_id": "file-none"}, "there is no file"),
        (jsonl(chat("a")), {"extra_body": {"priority": "urgent"}}, "priority"),
    ],
)
def test_a_batch_that_cannot_be_computed_is_refused(
    api: openai.OpenAI, data: bytes, fields: dict[str, Any], param: str
) -> None:
    file = api.files.create(file=("f.jsonl", data), purpose="batch")
    request: dict[str, Any] = {
        "input_file_id": file.id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        **fields,
    }
    with pytest.raises(openai.APIStatusError, match=param) as refused:
        api.batches.create(**request)
    assert refused.value.status_code in (400, 403, 404)
    api.files.delete(file.id)


def test_files_for_other_purposes_and_other_bodies_are_refused(
    api: openai.OpenAI, web: httpx.Client
) -> None:
    before = len(list(api.files.list()))
    with pytest.raises(openai.BadRequestError, match="purpose"):
        api.files.create(file=("f.jsonl", b"{}"), purpose="fine-tune")
    response = web.post("/v1/files", json={"purpose": "batch"})
    assert response.status_code == 400
    assert "form with a file" in response.json()["error"]["message"]
    response = web.post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"})
    assert response.status_code == 400
    assert len(list(api.files.list())) == before


def test_a_large_file_passes_through(api: openai.OpenAI) -> None:
    lines = jsonl(*(chat(f"r{n}", text="x" * 1000) for n in range(3000)))
    file = api.files.create(file=("large.jsonl", io.BytesIO(lines)), purpose="batch")
    assert file.bytes == len(lines)
    assert api.files.content(file.id).content == lines


def test_too_many_lines_are_refused_while_they_arrive(api: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="lines or") as refused:
        api.files.create(file=("f.jsonl", b"{}\n" * 60_000), purpose="batch")
    assert refused.value.status_code == 413


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_forms_are_read_in_parts_of_any_size(size: int) -> None:
    content = b"line\r\n--not the mark\r\n\r\n" * 40
    body = (
        b'--mark\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--mark\r\nContent-Disposition: form-data; name="file"; filename="a b.jsonl"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n--mark--\r\n"
    )
    form = FormReader("multipart/form-data; boundary=mark")
    found = b"".join(
        part.data
        for start in range(0, len(body), size)
        for part in form.add(body[start : start + size])
    )
    form.check_end()
    assert (found, form.fields, form.file_name) == (content, {"purpose": "batch"}, "a b.jsonl")


@pytest.mark.parametrize(
    "body",
    [
        b'--mark\r\nContent-Disposition: form-data; name="file"\r\n\r\ncut',
        b"--mark\r\nContent-Disposition: form-data\r\n\r\nx\r\n--mark--",
        b"--mark\r\n" + b"x" * 40_000,
        b'--mark\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + b"x" * 100_000,
        b"--mark--",
        b"",
    ],
)
def test_forms_that_are_no_forms_are_refused(body: bytes) -> None:
    form = FormReader('multipart/form-data; boundary="mark"')
    with pytest.raises(InvalidArgument):
        for part in form.add(body):
            assert part
        form.check_end()


def test_windows_are_hours_or_days() -> None:
    assert (window_s("24h"), window_s("7d")) == (86_400, 7 * 86_400)
    for wrong in ("", "24", "0h", "31d", "1h2", "9999h"):
        with pytest.raises(InvalidArgument):
            window_s(wrong)


# Responses in the background.


def finished(api: Any, response_id: str) -> Any:
    def poll() -> Any:
        found = api.responses.retrieve(response_id)
        return found if found.status not in ("queued", "in_progress") else None

    return wait_until(poll)


def test_a_response_goes_on_without_its_client(api: Any) -> None:
    begun = api.responses.create(model="echo", input="hello", background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    done = finished(api, begun.id)
    assert (done.id, done.status, done.output_text) == (begun.id, "completed", "hello")
    assert done.usage.output_tokens > 0
    following = api.responses.create(model="echo", input="more", previous_response_id=begun.id)
    assert following.previous_response_id == begun.id
    api.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(begun.id)


def test_the_events_of_a_response_are_read_from_any_of_them_on(api: Any) -> None:
    with api.responses.create(
        model="slow", input="some words in it", background=True, stream=True
    ) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    response = events[-1].response
    assert response.output_text == "some words in it"
    with api.responses.retrieve(response.id, stream=True, starting_after=4) as stream:
        assert [event.model_dump() for event in stream] == [e.model_dump() for e in events[5:]]
    with api.responses.retrieve(response.id, stream=True) as stream:
        assert len(list(stream)) == len(events)
    assert api.responses.retrieve(response.id).output_text == "some words in it"
    assert api.responses.cancel(response.id).status == "completed"


def test_a_reader_that_disconnects_changes_nothing_and_another_one_continues(
    api: Any,
) -> None:
    stream = api.responses.create(model="slow", input=LONG[:200], background=True, stream=True)
    first = [next(stream) for _ in range(6)]
    stream.close()
    response_id = first[0].response.id
    with api.responses.retrieve(response_id, stream=True, starting_after=5) as rest:
        events = [*first, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == LONG[:200] == finished(api, response_id).output_text


def test_a_response_is_cancelled_and_its_stream_ends(api: Any) -> None:
    stream = api.responses.create(model="slow", input=LONG, background=True, stream=True)
    response_id = next(stream).response.id
    assert api.responses.retrieve(response_id).status in ("queued", "in_progress")
    assert api.responses.cancel(response_id).status == "cancelled"
    assert list(stream)[-1].response.status == "cancelled"
    assert api.responses.retrieve(response_id).status == "cancelled"
    api.responses.delete(response_id)


def test_background_responses_that_cannot_be_computed_are_refused(api: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        api.responses.create(model="missing", input="x", background=True)
    with pytest.raises(openai.BadRequestError, match="store"):
        api.responses.create(model="echo", input="x", background=True, store=False)
    foreground = api.responses.create(model="echo", input="x")
    with pytest.raises(openai.BadRequestError, match="background"):
        api.responses.retrieve(foreground.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="in the background"):
        api.responses.cancel(foreground.id)


def test_a_failed_response_has_its_error(api: Any) -> None:
    begun = api.responses.create(
        model="echo", input="x", background=True, previous_response_id=f"resp_{'0' * 40}"
    )
    done = finished(api, begun.id)
    assert done.status == "failed"
    assert done.error is not None and "there is no response" in done.error.message


def test_a_request_of_a_batch_is_not_put_into_the_background(api: Any) -> None:
    body = {"model": "echo", "input": "x", "background": True}
    line = {"custom_id": "r", "url": "/v1/responses", "body": body}
    batch = api.batches.create(
        input_file_id=upload(api, line).id, endpoint="/v1/responses", completion_window="24h"
    )
    done = ended(api, batch.id)
    assert done.request_counts.failed == 1
    assert "batch" in api.files.content(done.error_file_id).text


def test_kills_of_daemon_and_gateway_lose_and_repeat_no_event() -> None:
    with running_daemon(CONFIG) as daemon:
        with gateway(daemon) as http, client_of(http) as api:
            stream = api.responses.create(
                model="slow", input=LONG[:400], background=True, stream=True
            )
            events = [next(stream) for _ in range(20)]
            stream.close()
            response_id = events[0].response.id
            batch = batch_of(api, *(chat(f"r{n}", "slow") for n in range(10)))
            http.process.kill()
            daemon.kill()
        daemon.start_again()
        with Client(daemon.socket) as client:
            client.jobs.wait(batch.id)  # no gateway runs
            client.jobs.wait(response_id)
        with gateway(daemon) as http, client_of(http) as api:
            with api.responses.retrieve(response_id, stream=True, starting_after=19) as rest:
                events += list(rest)
            assert [e.sequence_number for e in events] == list(range(len(events)))
            text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            assert text == LONG[:400] == api.responses.retrieve(response_id).output_text
            done = api.batches.retrieve(batch.id)
            assert done.request_counts.completed == 10


def client_of(http: RunningGateway, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{http.url}/v1", api_key=key, timeout=CALL_S_MAX, max_retries=0)


def test_keys_have_their_own_files_and_batches_and_models(daemon: RunningDaemon) -> None:
    keys = {name: new_key(name) for name in ("ada", "bob")}
    file = daemon.directory / "keys.toml"
    text = "".join(entry for _, entry in keys.values())
    file.write_text(text + 'models = ["echo"]\n')  # bob's
    with (
        gateway(daemon, "--keys", str(file)) as http,
        client_of(http, keys["ada"][0]) as ada,
        client_of(http, keys["bob"][0]) as bob,
    ):
        batch = batch_of(ada, chat("r"), chat("s", "slow"))
        done = ended(ada, batch.id)
        assert done.request_counts.completed == 2
        background = ada.responses.create(model="echo", input="x", background=True)
        for found in (bob.batches.list(), bob.files.list()):
            assert list(found) == []
        calls: tuple[Callable[[], Any], ...] = (
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
            lambda: bob.files.content(done.output_file_id),
            lambda: bob.files.delete(done.input_file_id),
            lambda: bob.responses.retrieve(background.id),
            lambda: bob.responses.cancel(background.id),
            lambda: bob.responses.delete(background.id),
        )
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call()
        own = ended(bob, batch_of(bob, chat("r"), chat("s", "slow")).id)
        assert own.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
        file.write_text(keys["bob"][1])  # ada's key is revoked
        http.process.send_signal(signal.SIGHUP)
        wait_until(lambda: _is_refused(ada))
        with Client(daemon.socket) as operator:
            [listed] = [j for j in operator.jobs.list(all_users=True) if j["id"] == batch.id]
            assert (listed["user"], listed["state"]) == ("@ada", "completed")
            assert operator.jobs.delete(batch.id)


def usage_of(daemon: RunningDaemon) -> dict[str, Any]:
    """Return the sum of each key's usage."""
    with Client(daemon.socket) as operator:
        return {str(row["key"]): row for row in operator.usage(["key"], all_users=True)}


def test_requests_of_a_batch_count_for_the_key_that_submitted_it_and_keep_its_limits(
    daemon: RunningDaemon,
) -> None:
    entries = [new_key(name) for name in ("phone", "tablet")]
    file = daemon.directory / "limited.toml"
    file.write_text("".join(f'{entry}user = "@shared"\n' for _, entry in entries))
    with file.open("a") as tablets:
        tablets.write("tokens-per-month = 1\n")
    with (
        gateway(daemon, "--keys", str(file)) as http,
        client_of(http, entries[0][0]) as phone,
        client_of(http, entries[1][0]) as tablet,
    ):
        assert ended(phone, batch_of(phone, chat("r"), chat("s")).id).request_counts.completed == 2
        response = phone.responses.create(model="echo", input="x", background=True)
        assert finished(phone, response.id).status == "completed"
        assert ended(tablet, batch_of(tablet, chat("r")).id).request_counts.completed == 1
        found = usage_of(daemon)
        assert (found["phone"]["requests"], found["tablet"]["requests"]) == (3, 1)
        assert found["phone"]["generated_tokens"] > found["tablet"]["generated_tokens"] > 0
        waiting = batch_of(tablet, chat("r"))  # the month's token is used
        wait_until(lambda: usage_of(daemon)["tablet"]["refused"])
        now = tablet.batches.retrieve(waiting.id)
        assert (now.status, now.request_counts.completed) == ("in_progress", 0)
        tablet.batches.cancel(waiting.id)
        assert ended(phone, batch_of(phone, chat("r")).id).request_counts.completed == 1


def _is_refused(api: Any) -> bool:
    try:
        api.batches.list()
    except openai.AuthenticationError:
        return True
    return False
