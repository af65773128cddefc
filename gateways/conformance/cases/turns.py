"""Cases of turns: the wasi-nn calls, chats, embeddings, tokens, and the metadata."""

from __future__ import annotations

import struct

from ..peer import Map, check
from ..suite import Server, case, expect, metadata, output, set_input

METADATA: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("input_tokens", "output_tokens", "llama_build_number"), (int,)),
    **dict.fromkeys(("cached_tokens", "shifts", "recomputed_tokens", "seed"), (int,)),
    **dict.fromkeys(("queue_ms", "ttft_ms", "prompt_ms", "predicted_ms"), (int, float)),
    **dict.fromkeys(("llama_commit", "stop_detail", "model", "fingerprint"), (str,)),
    **dict.fromkeys(("stop_reason", "session_id"), (str, type(None))),
    **dict.fromkeys(("not_applied", "adjusted", "lora", "error"), (dict,)),
    "ignored": (list,),
    "shifted": (bool,),
    "durable": (bool, type(None)),
}
ALWAYS = ("input_tokens", "output_tokens", "llama_build_number", "llama_commit")
"""WasmEdge's keys, which the metadata always has."""


def check_metadata(found: Map) -> None:
    """Check the types of the metadata's keys."""
    for key in ALWAYS:
        check(key in found, f"the metadata has no {key!r}")
    for key, value in found.items():
        kinds = METADATA.get(key)
        check(kinds is None or type(value) in kinds, f"{key!r} of the metadata is {value!r}")


@case("`compute`")
def the_echo_model_answers_with_its_prompt(server: Server) -> None:
    """`set_input`, `compute` and `get_output` return the answer, here the prompt."""
    connection, context = server.connected()
    set_input(connection, context, b"hello")
    check(connection.call("compute", context=context).get("outputs", []) == [], "it has outputs")
    check(output(connection, context) == b"hello", "the answer is not the prompt")


@case("`compute`")
def a_turn_without_new_input_computes_the_same_prompt(server: Server) -> None:
    """A turn without new input computes the same prompt again."""
    connection, context = server.connected()
    set_input(connection, context, b"again")
    for _ in range(2):
        connection.call("compute", context=context)
        check(output(connection, context) == b"again", "the answer is not the prompt")


@case("`compute`")
def a_turn_needs_an_input(server: Server) -> None:
    """`compute` without any input is InvalidArgument."""
    connection, context = server.connected()
    for call in ("compute", "compute_single"):
        expect(connection.refusal(call, context=context), "InvalidArgument")


@case("`get_output`, `get_output_single`")
def before_any_turn_the_text_is_empty(server: Server) -> None:
    """Before any turn the text is empty, and the metadata is available."""
    connection, context = server.connected()
    check(output(connection, context) == b"", "there is a text")
    check_metadata(metadata(connection, context))


@case("`get_output`, `get_output_single`")
def a_buffer_that_is_too_small_loses_nothing(server: Server) -> None:
    """An output longer than `size_max` is TooLarge with `data.needed`, and nothing is lost."""
    connection, context = server.connected()
    set_input(connection, context, b"hello")
    connection.call("compute", context=context)
    for size in (0, 4):
        refused = connection.refusal("get_output", context=context, size_max=size)
        check(expect(refused, "TooLarge").data.get("needed") == 5, f"data is {refused.data!r}")
    check(output(connection, context, size_max=5) == b"hello", "the output is lost")


@case("`get_output`, `get_output_single`")
def there_are_two_outputs(server: Server) -> None:
    """Output 0 is text and output 1 the metadata; any other index is NotFound."""
    connection, context = server.connected()
    for index in (2, -1):
        expect(connection.refusal("get_output", context=context, index=index), "NotFound")


@case("`compute_single`")
def tokens_are_pulled_one_by_one(server: Server) -> None:
    """`compute_single` samples the next token; EndOfSequence marks the end of the turn."""
    connection, context = server.connected()
    set_input(connection, context, b"abc")
    for letter in (b"a", b"b", b"c"):
        piece = connection.call("compute_single", context=context).get("piece", b"")
        single = bytes(connection.call("get_output_single", context=context)["data"])
        check(piece == single == letter, f"the piece is {piece!r} and the output {single!r}")
    refused = expect(connection.refusal("compute_single", context=context), "EndOfSequence")
    check(refused.data.get("stop_reason") == "eos", f"data is {refused.data!r}")
    check(output(connection, context) == b"abc", "the output is not the whole text")
    piece = connection.call("compute_single", context=context).get("piece", b"")
    check(piece == b"a", "the next call does not begin the same prompt again")


@case("`compute_single`")
def a_piece_never_ends_within_a_character(server: Server) -> None:
    """A piece is empty while a character is incomplete."""
    connection, context = server.connected()
    text = "aé€😀"
    set_input(connection, context, text.encode())
    pieces = []
    for _ in text.encode():
        piece = connection.call("compute_single", context=context).get("piece", b"")
        try:
            pieces.append(piece.decode())
        except UnicodeDecodeError:
            check(False, f"the piece {piece!r} ends within a character")
    check("".join(pieces) == text, f"the pieces are {pieces!r}")


@case("`fini_single`")
def fini_single_discards_the_output(server: Server) -> None:
    """`fini_single` ends a running turn and discards its output; the input stays."""
    connection, context = server.connected()
    set_input(connection, context, b"abc")
    connection.call("compute_single", context=context)
    connection.call("fini_single", context=context)
    check(output(connection, context) == b"", "the output is still there")
    connection.call("compute", context=context)
    check(output(connection, context) == b"abc", "the input is lost")


@case("Metadata")
def the_metadata_describes_the_turn(server: Server) -> None:
    """The metadata has the turn's counts, its reason to stop, its seed and its model."""
    connection, context = server.connected()
    set_input(connection, context, b'{"n-predict": 2, "seed": 5}', index=1)
    set_input(connection, context, b"abcd")
    connection.call("compute", context=context)
    found = metadata(connection, context)
    check_metadata(found)
    check(found["output_tokens"] == 2, f"output_tokens is {found['output_tokens']}")
    check(found["input_tokens"] >= 4, f"input_tokens is {found['input_tokens']}")
    check(found["stop_reason"] == "length", f"stop_reason is {found['stop_reason']!r}")
    check(found["seed"] == 5, f"seed is {found['seed']}")
    check(found["model"] == server.model, f"model is {found['model']!r}")


@case("Metadata")
def a_stop_text_ends_the_turn(server: Server) -> None:
    """`stop_reason` and `stop_detail` name the condition that ended the turn."""
    connection, context = server.connected()
    result = connection.call("chat", context=context, prompt="ab.cd", options={"stop": ["."]})
    check(result["text"] == b"ab", f"the answer is {result['text']!r}")
    found = result["metadata"]
    check(found["stop_reason"] == "stop", f"stop_reason is {found['stop_reason']!r}")
    check(found["stop_detail"] == ".", f"stop_detail is {found['stop_detail']!r}")


@case("`prompt_compute`")
def prompt_compute_appends_to_the_history(server: Server) -> None:
    """The prompt interface appends the prompt to the history, and returns the answer."""
    connection, context = server.connected()
    for prompt in ("ab", "cd"):
        text = connection.call("prompt_compute", context=context, prompt=prompt)["text"]
        check(text == prompt, f"the answer is {text!r}")
    left = connection.call("rewind", context=context, turns=1).get("tokens", 0)
    check(left > 0, "the second prompt replaced the first")


@case("`run_inference`")
def run_inference_removes_zero_bytes(server: Server) -> None:
    """The tensor's text is the user's message; zero bytes at its end are removed."""
    connection, context = server.connected()
    tensor = {"data": b"hello\x00\x00"}
    text = connection.call("run_inference", context=context, tensor=tensor).get("text")
    check(text == b"hello", f"the answer is {text!r}")
    result = connection.call(
        "run_inference", context=context, tensor=tensor, config='{"n-predict": 1}'
    )
    check(result.get("text") == b"h", f"the answer is {result.get('text')!r}")


@case("`chat`")
def a_chat_takes_messages(server: Server) -> None:
    """`messages` are added to the history; `text` is the whole answer."""
    connection, context = server.connected()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    result = connection.call("chat", context=context, messages=messages)
    check(result["text"] == b"hello", f"the answer is {result['text']!r}")
    check_metadata(result["metadata"])
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    expect(connection.refusal("chat", context=context, messages=image), "InvalidArgument")


@case("`answers`")
def answers_are_several(server: Server) -> None:
    """`answers` generates several answers to one prompt, in their order."""
    connection, context = server.connected()
    found = connection.call("answers", context=context, n=3, prompt="ab", options={"seed": 8})
    answers = found["answers"]
    check([a.get("text") for a in answers] == [b"ab"] * 3, f"the answers are {answers!r:.200}")
    seeds = [a["metadata"]["seed"] for a in answers]
    check(seeds == [8, 9, 10], f"the seeds are {seeds!r}")
    check(all(a.get("error") is None for a in answers), "an answer has an error")


@case("`embed`")
def embeddings_are_vectors_of_float32(server: Server) -> None:
    """`embed` returns for each text a vector of `size` float32, little-endian."""
    connection = server.connect()
    graph = server.graph(connection)
    result = connection.call("embed", graph=graph, texts=["a", "b", "a"])
    vectors = result["embeddings"]
    check(len(vectors) == 3, f"{len(vectors)} vectors for 3 texts")
    for vector in vectors:
        check(len(vector) == 4 * result["size"], f"a vector has {len(vector)} bytes")
    check(vectors[0] == vectors[2] != vectors[1], "the vectors do not match their texts")
    norm = sum(x * x for x in struct.unpack(f"<{result['size']}f", vectors[0]))
    check(abs(norm - 1) < 1e-3, f"the vector's length is {norm**0.5:.4f}, not 1")
    check(len(result.get("tokens", [])) == 3, f"tokens is {result.get('tokens')!r}")


@case("`embed`")
def texts_that_are_too_long_are_refused_or_truncated(server: Server) -> None:
    """`embed` leaves out the end of a text that is too long with `truncate`, else refuses it."""
    connection = server.connect()
    graph = server.graph(connection, '{"ctx-size": 64}')
    texts = ["a", "x" * 100]
    refused = connection.refusal("embed", graph=graph, texts=texts)
    expect(refused, "PromptTooLong")
    check(refused.data.get("index") == 1, f"data is {refused.data!r}")
    result = connection.call("embed", graph=graph, texts=texts, truncate=True)
    check(result.get("truncated") == [1], f"truncated is {result.get('truncated')!r}")
    check(result["tokens"][1] == 64, f"tokens is {result['tokens']!r}")


@case("`usage`")
def usage_counts_the_turns_that_have_ended(server: Server) -> None:
    """`usage` counts a turn before its reply; a column that it does not know is refused."""
    connection, context = server.connected()

    def requests() -> int:
        return sum(row["requests"] for row in connection.call("usage", by=["model"])["usage"])

    before = requests()
    connection.call("chat", context=context, prompt="ab", raw=True)
    check(requests() > before, "the turn does not count")
    expect(connection.refusal("usage", by=["colour"]), "InvalidArgument")


@case("`rerank`")
def only_reranking_models_rank_documents(server: Server) -> None:
    """`rerank` of a model that generates text is refused with UnsupportedOperation."""
    connection = server.connect()
    graph = server.graph(connection)
    refused = connection.refusal("rerank", graph=graph, query="a", documents=["b"])
    expect(refused, "UnsupportedOperation")


@case("`tokenize`")
def tokens_become_their_text_again(server: Server) -> None:
    """`tokenize` returns ids, and `detokenize` their bytes."""
    connection = server.connect()
    graph = server.graph(connection)
    text = "hé €"
    tokens = connection.call("tokenize", graph=graph, text=text)["tokens"]
    check(tokens and all(type(t) is int for t in tokens), f"the tokens are {tokens!r}")
    back = connection.call("detokenize", graph=graph, tokens=tokens)["text"]
    check(back == text.encode(), f"the text is {back!r}")
    longer = connection.call("tokenize", graph=graph, text=text, bos=True)["tokens"]
    check(len(longer) > len(tokens), "`bos` adds no token")


@case("`apply_template`")
def the_template_renders_messages(server: Server) -> None:
    """`apply_template` returns the prompt, and its number of tokens."""
    connection = server.connect()
    messages = [{"role": "user", "content": "hi"}]
    result = connection.call("apply_template", graph=server.graph(connection), messages=messages)
    check(b"hi" in result["text"], f"the prompt is {result['text']!r}")
    check(type(result.get("tokens")) is int and result["tokens"] > 0, "it has no tokens")


@case("`models`")
def the_model_is_listed(server: Server) -> None:
    """`models` lists the names by which clients load models, and `show` one of them."""
    connection = server.connect()
    server.graph(connection)
    entry = next(
        (m for m in connection.call("models")["models"] if m["name"] == server.model), None
    )
    check(entry is not None, f"{server.model!r} is not in the list")
    shown = connection.call("show", name=server.model)
    found = shown.get("models", [shown])[0]
    check(found["name"] == server.model, f"`show` returns {found['name']!r}")
    check(found["state"] == "ready", f"the state is {found['state']!r}")
    expect(connection.refusal("show", name="no-such-model"), "ModelNotFound")


@case("Traces")
def a_span_of_another_form_is_refused(server: Server) -> None:
    """A `traceparent` is in W3C's format; any other value is InvalidArgument."""
    connection, context = server.connected()
    good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    connection.call("chat", context=context, prompt="a", traceparent=good)
    for bad in ("x", good.replace("00-4", "ff-4"), good + "-"):
        params = {"context": context, "prompt": "a", "traceparent": bad}
        expect(connection.refusal("chat", **params), "InvalidArgument")
