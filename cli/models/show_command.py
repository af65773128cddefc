"""`inferd show`: one model, in sections for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Annotated, Any

import msgspec
import typer

from ...backends.answer_form import AnswerForm
from ...backends.errors import NotFound, error_from_wire
from ...daemon.printable import escape_controls, size_text
from ..client import client_of
from ..monitoring.status_commands import media_text, memory_text, processor_text, until_text
from ..options import JsonOutput, ModelName, SocketPath
from ..output import write, write_answer, write_json

TEMPLATE_LINES, TEMPLATE_COLUMNS = 8, 96
"""The part of a chat template that is shown without `--template`."""
RAW = "`inferd run --raw`, or set chat-template"
FALLBACK = "chats are written in ChatML or with role prefixes; or set chat-template"
ECHO = "echo, which answers with its prompt"
UNKNOWN_YET = "known after its first load"
TEMPLATE_OPTIONS = ("chat-template", "chat-template-file")
Entry = tuple[str, object]
"""A name and its value; an entry whose value is None is not shown."""
Section = tuple[str, list[Entry]]

SETTING_SOURCES = {
    "configured": "as configured",
    "measured": "measured here",
    "like": "as for a similar model",
    "rule": "by a rule for this CPU",
    "default": "by default",
}
"""By the source of a model's setting, words for people."""


def show(
    name: ModelName,
    template: Annotated[
        bool,
        typer.Option(
            "--template",
            help="Print only the whole chat template of the file, and the form of answers.",
        ),
    ] = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Describe a model: its kind, memory, settings and chat template.

    The model does not have to be loaded.
    """
    with client_of(socket) as client:
        found: dict[str, Any] = dict(client.show(name))
    if as_json:
        write_json(found)
    elif template:
        write_answer(_template_of(found) + _answer_comment(found))
    else:
        _write_sections(found)


def _drafts_text(found: Mapping[str, Any]) -> str | None:
    """Return how many drafts were accepted in the last days, and the speed of the steps with drafts
    beside what it would have been; None if there were none.
    """
    drafts = found.get("drafts")
    if not drafts:
        return None
    accepted, drafted, tokens = drafts["accepted"], drafts["drafted"], drafts["tokens"]
    text = f"{count_text(accepted)} of {count_text(drafted)} tokens ({accepted / drafted:.0%})"
    text += " in 7 days"
    if not (drafts["seconds"] and drafts["plain_seconds"]):
        return text
    fast, plain = tokens / drafts["seconds"], tokens / drafts["plain_seconds"]
    return f"{text}: {fast:.1f} instead of {plain:.1f} tokens/s in steps with drafts"


def _template_of(found: Mapping[str, Any]) -> str:
    text = (found.get("file_info") or {}).get("chat_template")
    if not text:
        raise NotFound(
            f"the file of {found['name']} has no chat template", hint=f"prompt it with {RAW}"
        )
    return str(text)


def _answer_comment(found: Mapping[str, Any]) -> str:
    """Return the form of answers as a comment of the template, as `tool-format` takes it."""
    form = _answer_form(found)
    if form is None:
        return ""
    data = json.dumps(msgspec.to_builtins(form), ensure_ascii=False, indent=2)
    return (
        f"\n{{#- The form of answers, as tool-format takes it:\n{data.replace('#}', '#')}\n-#}}\n"
    )


def _answer_form(found: Mapping[str, Any]) -> AnswerForm | None:
    """Return the form of answers: of the loaded model, or derived from the file's template."""
    if found["info"] is not None:
        return msgspec.convert(found["info"]["answer_form"], AnswerForm)
    if _sets_template(found) or "tool-format" in found["options"]:
        return None
    from ...backends.llama.text.renderer import Renderer, TemplateRefusal
    from ...backends.llama.text.template import ChatTemplate

    with closing(
        ChatTemplate(Renderer(_template_of(found)), bos="", eos="", strip_bos=False)
    ) as made:
        try:
            made.prepare()
        except TemplateRefusal:
            return None
        return made.answer_form


def _write_sections(found: Mapping[str, Any]) -> None:
    paragraphs = [[title, *_aligned(entries)] for title, entries in sections_of(found)]
    paragraphs.append(list(_template_lines(found)))
    write("\n\n".join("\n".join(lines) for lines in paragraphs if lines[1:]))


def _aligned(entries: list[Entry]) -> Iterator[str]:
    """Yield a line for each entry with a value."""
    shown = [(escape_controls(name), value) for name, value in entries if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        yield f"  {name:<{width}}   {' '.join(str(value).splitlines())}"


def sections_of(found: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the sections of a model as the call `show` describes it, without its template."""
    yield found["name"], _entries_of_kind(found)
    nextn = "its NextN layer" if (found["info"] or {}).get("nextn") else None
    state = [*_entries_of_state(found), ("drafts with", nextn)]
    state.append(("accepted drafts", _drafts_text(found)))
    yield "State", state
    for title, key in (("Inputs", "inputs"), ("Outputs", "outputs")):
        yield title, _entries_of_tensors(found.get(key) or (found["info"] or {}).get(key) or ())
    yield "Batches", _entries_of_batches(found["info"] or {})
    yield "Projector", _entries_of_projector(found.get("projector") or {})
    yield "Draft model", _entries_of_draft_model(found.get("draft_model") or {})
    title = "Memory, estimated" if found["memory"] else "Memory for its next load, estimated"
    yield title, _entries_of_memory(found)
    adapters = [(a["name"], _adapter_text(a)) for a in found["adapters"]]
    yield "Adapters", [*adapters]
    yield "Ceilings of turns by this name", list(_settings(found.get("ceilings") or {}))
    yield "Settings that differ from the defaults", list(_settings(_changed(found["options"])))
    sampling = (found["info"] or {}).get("sampling") or {}
    special = (found["info"] or {}).get("special_tokens") or {}
    tokens = [(n, f"{t['id']}  {json.dumps(t['text'])}") for n, t in special.items()]
    yield "Special tokens", [*tokens]
    yield "Sampling that its file recommends", list(_settings(sampling))


def _entries_of_kind(found: Mapping[str, Any]) -> list[Entry]:
    facts, info = found.get("file_info") or {}, found["info"] or {}
    parameters = facts.get("parameters") or info.get("parameters")
    trained = facts.get("ctx_size_trained") or info.get("ctx_size_trained")
    embedding = facts.get("embedding_size") or (info.get("embedding") or {}).get("size")
    file, sizes = found["file"], [size_text(found["size_bytes"])] if found["size_bytes"] else []
    return [
        ("another name of", found.get("of") or None),
        ("other names", ", ".join(found.get("names") or ()) or None),
        ("title", facts.get("title")),
        ("architecture", ECHO if found["backend"] == "echo" else facts.get("architecture")),
        ("parameters", count_text(parameters) if parameters else None),
        ("quantization", facts.get("quantization")),
        ("context", f"{trained} tokens, as trained" if trained else None),
        ("embedding length", embedding),
        ("layers", facts.get("layers")),
        ("NextN layers", facts.get("nextn_layers") or None),
        ("tools", _tools_text(found)),
        ("reads", _reads_text(found)),
        ("license", _license_text(facts)),
        ("chat template", _template_notes(found)),
        *_answer_entries(info),
        ("file", ", ".join([file, *sizes]) if file else None),
        ("swapped to", _swap_text(found)),
        ("problem", found.get("file_error")),
    ]


def _answer_entries(info: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the marks in answers of a loaded model, and what could not be found of them."""
    if not info.get("generates"):
        return
    form = msgspec.convert(info["answer_form"], AnswerForm)
    yield "reasoning", ", ".join(f"{b.begin.strip()} … {b.end.strip()}" for b in form.reasoning)
    marks = [next(iter(call.triggers), "a JSON object") for call in form.calls]
    yield "tool calls", ", ".join(filter(None, (form.shown_name, *dict.fromkeys(marks))))
    yield "answers", "; ".join(form.warnings) or None


def _entries_of_tensors(tensors: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Return the types and shapes of a graph's inputs or outputs by name."""
    from ...backends.tensors import shape_text

    return [(one["name"], f"{one['type']} {shape_text(one['shape'])}") for one in tensors]


def _entries_of_batches(info: Mapping[str, Any]) -> list[Entry]:
    """Return how many rows of inputs a graph computes together, or why none."""
    if not info.get("inputs"):
        return []
    none = f"none: {info['no_batches']}" if info["no_batches"] else None
    return [("rows", none or f"up to {info['batch_max']} of several inputs at a time")]


def _swap_text(found: Mapping[str, Any]) -> str | None:
    to = found.get("swapped_to")
    return f"{to}; `inferd swap {found['name']} --undo` ends it" if to else None


def _reads_text(found: Mapping[str, Any]) -> str | None:
    media = media_text(found)
    return f"text, {media}" if media else None


def _entries_of_projector(projector: Mapping[str, Any]) -> list[Entry]:
    """Return the entries of the projector, or the reasons why there is none."""
    size, buffer = projector.get("size_bytes"), projector.get("buffer_bytes")
    tokens, side = projector.get("image_tokens_max"), projector.get("image_size")
    return [
        ("type", projector.get("type") or None),
        ("file", f"{projector['file']}, {size_text(size)}" if size else None),
        ("images", f"trained with {side} × {side} pixels" if side else None),
        ("tokens per image", f"at most {tokens}" if tokens else None),
        ("embedding length", projector.get("width") or None),
        ("compute buffer", size_text(buffer) if buffer else None),
        ("process", projector.get("pid") or None),
        ("left out", projector.get("note") or None),
        ("problem", projector.get("error")),
    ]


def _tools_text(found: Mapping[str, Any]) -> str | None:
    """Return whether requests may have tools; None if unknown. A template that the settings name is
    known only once the model is loaded.
    """
    info, facts = found["info"], found.get("file_info")
    if info is not None:
        if info.get("inputs"):
            return None  # a graph
        return "yes" if info["has_chat_template"] and "tools" not in info["unused"] else "no"
    if facts is None or _sets_template(found):
        return None
    return "yes" if facts["supports_tools"] else "no"


def _template_notes(found: Mapping[str, Any]) -> str | None:
    """Return the notes on the template; without a template, the forms that take its place."""
    facts = found.get("file_info")
    notes = dict((found["info"] or {}).get("chat_notes") or {})
    if facts is not None and not facts["chat_template"] and not _sets_template(found):
        notes.setdefault("chat-template", f"none: {FALLBACK}")
    return "; ".join(map(str, notes.values())) or None


def _sets_template(found: Mapping[str, Any]) -> bool:
    return any(name in found["options"] for name in TEMPLATE_OPTIONS)


def _license_text(facts: Mapping[str, Any]) -> str | None:
    name, link = facts.get("license"), facts.get("license_link")
    return f"{name} ({link})" if name and link else name or link


def _entries_of_state(found: Mapping[str, Any]) -> list[Entry]:
    info, error = found["info"], found["error"]
    shape = info or found.get("estimate") or {}
    slots, ctx_size = shape.get("slots"), shape.get("ctx_size")
    sessions = f"{ctx_size} tokens in each of {slots} sessions at once" if ctx_size else None
    if info is None:
        state = "not loaded" if found["state"] == "cold" else found["state"]
        cause = error_from_wire(error).text_for_people if error else None
        device = ("device", found.get("device") or None)
        return [("state", state), ("cause", cause), ("context", sessions), device]
    return [
        ("state", found["state"]),
        ("until", until_text(found)),
        ("context", sessions),
        ("processor", processor_text(found)),
        *_entries_of_setting(found.get("setting")),
        ("process", f"{found['pid']}, {memory_text(found) or '-'} in use"),
        ("fingerprint", info["fingerprint"]),
    ]


def _entries_of_setting(setting: Mapping[str, Any] | None) -> list[Entry]:
    """Return the setting with which the model computes, and that of its next load if it differs."""
    if setting is None:
        return []
    entries = [("flash attention", _setting_text(setting))]
    later = setting["next_load"]
    if any(later[key] != setting[key] for key in ("flash_attn", "threads", "threads_batch")):
        entries.append(("from its next load on", _setting_text(later)))
    return [*entries]


def _setting_text(setting: Mapping[str, Any]) -> str:
    parts = ["on" if setting["flash_attn"] else "off"]
    if setting["threads"]:
        parts.append(f"{setting['threads']} threads for single tokens")
    return f"{', '.join(parts)}, {SETTING_SOURCES[setting['source']]}: {setting['reason']}"


def _entries_of_memory(found: Mapping[str, Any]) -> list[Entry]:
    need = found["memory"] or found.get("estimate")
    if need is None or not need["weights"]:
        return []
    shape = found["info"] or need
    cells = shape.get("slots", 0) * shape.get("ctx_size", 0)
    states = _size(need["context"]) or UNKNOWN_YET
    if need["context"] and cells and _grows_with_tokens(found):
        states = f"{states}, {size_text(need['context'] / cells)} a token"
    if need["context"] and need["total"] is None:
        states = f"at most {states}"
    devices = need["devices"] or {}
    is_graph = need["context"] == 0 and not shape.get("ctx_size")
    return [
        ("weights", size_text(need["weights"])),
        ("KV states", None if is_graph else states),
        ("of these by options", _options_text(found["options"], need.get("options"))),
        ("compute buffers", None if is_graph else _size(need["compute"]) or UNKNOWN_YET),
        ("program", _size(need["process"])),
        ("images and sounds", _size(need.get("projector") or None)),
        (
            "draft model" if found.get("draft_model") else "NextN layers",
            _size(need.get("draft") or None),
        ),
        ("total", _size(need["total"])),
        *((f"on {device}", size_text(size)) for device, size in devices.items()),
        ("for embeddings", f"{size_text(need['embedding'])} more" if need["embedding"] else None),
    ]


def _entries_of_draft_model(draft: Mapping[str, Any]) -> list[Entry]:
    size = draft.get("size_bytes")
    file = ", ".join([draft["file"], *([size_text(size)] if size else [])]) if draft else None
    return [("file", file or None), ("refused", draft.get("error"))]


def _options_text(options: Mapping[str, Any], added: int | None) -> str | None:
    """Return the memory that the engine's options cost or save; *added* is None if unknown."""
    from ...backends.engine_options import cache_share

    if added:
        return f"{size_text(abs(added))} {'more' if added > 0 else 'saved'}"
    share = cache_share(options)
    if added is None and share != 1:
        return f"{share:.0%} of the KV states in f16"
    return None


def _grows_with_tokens(found: Mapping[str, Any]) -> bool:
    """Return whether the KV state grows with each token; one without attention does not."""
    if found["info"] is not None:
        return bool(found["info"]["kv_kind"] != "recurrent")
    return (found.get("file_info") or {}).get("kv_token_bytes_max") is not None


def _size(size: int | None) -> str | None:
    return None if size is None else size_text(size)


def _adapter_text(adapter: Mapping[str, Any]) -> str:
    text = f"{adapter['file']}, {size_text(adapter['size_bytes'])}, scale {adapter['scale']:g}"
    return f"{text}, fails: {adapter['error']['message']}" if adapter["error"] else text


def _changed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that differ from their defaults."""
    from ...backends.params import BY_NAME

    return {
        name: value
        for name, value in options.items()
        if name not in BY_NAME or BY_NAME[name].default != value
    }


def _settings(values: Mapping[str, Any]) -> Iterator[Entry]:
    for name, value in values.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield name, _cut(" ".join(text.split()))


def _template_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the title and the first lines of the file's chat template."""
    text = (found.get("file_info") or {}).get("chat_template")
    if not text:
        return
    replaced = ", which the settings replace" if _sets_template(found) else ""
    yield f"Chat template of the file{replaced}"
    lines = text.splitlines()
    cut = len(lines) > TEMPLATE_LINES or any(len(ln) > TEMPLATE_COLUMNS for ln in lines)
    for line in lines[:TEMPLATE_LINES]:
        yield f"  {_cut(line)}"
    if cut:
        yield f"  (`inferd show {found['name']} --template` prints all {len(text)} characters)"


def _cut(line: str) -> str:
    return line if len(line) <= TEMPLATE_COLUMNS else f"{line[: TEMPLATE_COLUMNS - 1]}…"


def count_text(count: int) -> str:
    """Return a number of parameters in words, with three digits."""
    for name, size in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return str(count)
