"""Parameters of other runtimes: their spellings of values, values out of range that guests may
send, and their keys that have no effect here or are refused, with the reasons.

The keys come from WasmEdge's metadata parser, llama-server's requests and the configuration of
apuslabs/wasi_nn_backend, including its deleted versions. Answers report them as ignored; with
`strict` they are refused with the reason. Guests cannot read the message of an error, and other
runtimes accept values out of range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..texts import plain_number, shorten
from .fitting import as_whole
from .json_texts import decode_json
from .parameter_table import Parameter

TRIGGER_KINDS = ("token", "word", "pattern", "pattern-full")
"""In the order of llama-server's numbers (`common/common.h`)."""
CONDITIONS_MAX = 512
_ANY_OBJECT = {"type": "object"}
_GLOBAL_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")


def read_triggers(value: Any) -> list[list[Any]]:
    """Return triggers as pairs of a kind and a text or a token's number, or raise ValueError."""
    return [_trigger(item) for item in _items(value)]


def _grammar_triggers(value: Any) -> dict[str, Any]:
    """Return triggers, or with another key the patterns of ends that wasi_nn_backend's texts have
    under the same name, as `{"enabled": true, "patterns": […]}` or empty. It does not read them.
    """
    if isinstance(value, Mapping) and (not value or value.keys() & {"enabled", "patterns"}):
        return {"grammar-triggers.patterns": value}
    return {"grammar-triggers": value}


def _trigger(item: Any) -> list[Any]:
    if isinstance(item, str) and item:
        return ["word", item]
    if isinstance(item, list) and len(item) == 2:
        item = {"type": item[0], "value": item[1]}
    if not isinstance(item, Mapping):
        raise ValueError(f"{shorten(item)} is not a trigger: give a text, or a type and a value")
    kind, value = as_whole(item.get("type", "word")), item.get("value", "")
    if isinstance(kind, int) and not isinstance(kind, bool) and 0 <= kind < len(TRIGGER_KINDS):
        kind = TRIGGER_KINDS[kind]
    kind = kind.replace("_", "-") if isinstance(kind, str) else kind
    if kind not in TRIGGER_KINDS:
        raise ValueError(f"there is no trigger {shorten(kind)}; use {', '.join(TRIGGER_KINDS)}")
    if kind == "token":
        return [kind, read_token(item.get("token", value))]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{shorten(value)} is not a text that can start a grammar")
    return [kind, value]


def read_token(value: Any) -> int:
    """Return a token's number, or raise ValueError."""
    token = as_whole(value)
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
        raise ValueError(f"{shorten(value)} is not a token's number")
    return token


def _items(value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    if len(items) > CONDITIONS_MAX:
        raise ValueError(f"{len(items)} items; {CONDITIONS_MAX} at most")
    return items


def _maps(value: Any) -> list[Mapping[str, Any]]:
    items = _items(value)
    for item in items:
        if not isinstance(item, Mapping):
            raise ValueError(f"{shorten(item)} is not a condition: give an object")
    return items


def _token_conditions(value: Any) -> dict[str, Any]:
    tokens = []
    for item in _maps(value):
        mode = item.get("mode", "stop_on_token")
        if mode != "stop_on_token":
            raise ValueError(f"there is no mode {shorten(mode)}; use stop_on_token")
        tokens.append(read_token(item.get("token_id")))
    return {"stop-tokens": tokens}


def _pattern_conditions(value: Any) -> dict[str, Any]:
    patterns = []
    for item in _maps(value):
        pattern, kind = item.get("pattern"), item.get("match_type", "partial")
        if not isinstance(pattern, str) or kind not in ("partial", "full"):
            raise ValueError(f"{shorten(dict(item))} is not a pattern with a partial or full match")
        flags = _GLOBAL_FLAGS.match(pattern)
        head = flags.group() if flags else ""
        full = rf"{head}\A(?:{pattern[len(head) :]})"
        patterns.append(full if kind == "full" else pattern)
    return {"stop-patterns": patterns}


def _semantic_conditions(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in _maps(value):
        kind, threshold = item.get("type"), item.get("threshold", 0.8)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float):
            raise ValueError(f"{shorten(threshold)} is not a number")
        if not 0 < threshold < 1:
            raise ValueError(f"a threshold of {threshold:g}; it is between 0 and 1")
        match kind:
            case "completion_detection":
                found["stop-complete"] = ["sentence"]
            case "repetition_detection":
                found["stop-repetition"] = float(threshold)
            case "coherence_break":
                found["stop-surprisal"] = -math.log(1 - threshold)
            case "similarity" | "similarity_detection":
                found["stop-similarity"] = _similar_text(item)
                found["stop-similarity-threshold"] = float(threshold)
            case _:
                raise ValueError(f"there is no condition {shorten(kind)}; use {_SEMANTICS}")
    return found


_SEMANTICS = "completion_detection, repetition_detection, coherence_break, similarity"


def _similar_text(item: Mapping[str, Any]) -> str:
    text = item.get("text", item.get("target"))
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{shorten(text)} is not a text: give one to compare sentences with")
    return text


def _dynamic_timeout(value: Any) -> dict[str, Any]:
    [item] = _maps(value)[:1] or [{}]
    names = {
        "base_ms": "timeout-base-ms",
        "token_scale": "timeout-token-ms",
        "max_ms": "timeout-max-ms",
    }
    unknown = [key for key in item if key not in names]
    if unknown:
        raise ValueError(f"there is no {shorten(unknown[0])}; use {', '.join(names)}")
    return {name: item[key] for key, name in names.items() if key in item}


def _response_format(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{shorten(value)} is not a format: give a map with a type")
    match value.get("type"):
        case "text":
            return {"json-schema": ""}
        case "json_object":  # llama-server allows a schema here, too
            return {"json-schema": _schema_of(value, _ANY_OBJECT)}
        case "json_schema":
            described = value.get("json_schema")
            return {"json-schema": _schema_of(described if isinstance(described, dict) else {})}
        case "structural_tag":
            return {"structural-tag": value}
    kinds = "text, json_object, json_schema, structural_tag"
    raise ValueError(f"there is no type {shorten(value.get('type'))}; use {kinds}")


def _schema_of(value: Mapping[str, Any], default: Any = None) -> Any:
    schema = value.get("schema", default)
    if not isinstance(schema, dict | bool):
        raise ValueError('the schema is missing: give {"name": "…", "schema": {…}}')
    return schema


def _guided_json(value: Any) -> dict[str, Any]:
    schema = decode_json(value) if isinstance(value, str) else value
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{shorten(value)} is not a schema: send an object, or its JSON text")
    return {"json-schema": schema}


def _guided_json_object(value: Any) -> dict[str, Any]:
    return {"json-schema": _ANY_OBJECT} if _flag(value) else {}


def _reranking(value: Any) -> dict[str, Any]:
    return {"embedding": True, "pooling": "rank"} if _flag(value) else {}


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{shorten(value)} is neither true nor false")
    return value


def _guided_choice(value: Any) -> dict[str, Any]:
    """Return a grammar of the texts of which the answer is one."""
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{shorten(value)} is not a list of texts, with at least one")
    texts = (f'"{text.translate(_GBNF_ESCAPES)}"' for text in dict.fromkeys(value))
    return {"grammar": f"root ::= {' | '.join(texts)}"}


def _guided_grammar(value: Any) -> dict[str, Any]:
    """Return a grammar in GBNF or Lark; as in vLLM, only GBNF has `::=`."""
    return {"grammar" if isinstance(value, str) and "::=" in value else "lark": value}


def _white_space(value: Any) -> dict[str, Any]:
    """Return the layout whose white space matches a regular expression."""
    if not isinstance(value, str) or len(value) > _WHITE_SPACE_CHARACTERS_MAX:
        raise ValueError(f"{shorten(value)} is not a regular expression of white space")
    try:
        pattern = re.compile(value)
    except (re.error, OverflowError) as exc:
        raise ValueError(f"{shorten(value)} is not a regular expression: {exc}") from None
    if not pattern.fullmatch(""):
        raise ValueError(f"{shorten(value)} requires white space, which the daemon leaves out")
    return {"json-whitespace": "spaced" if pattern.fullmatch(" ") else "compact"}


def _structured_outputs(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{shorten(value)} is not a map")
    found: dict[str, Any] = {}
    formats = 0
    for name, item in value.items():
        if name not in _STRUCTURED_OUTPUTS:
            names = ", ".join(_STRUCTURED_OUTPUTS)
            raise ValueError(f"there is no {shorten(name)}; use {names}")
        if item is not None:
            read = _STRUCTURED_OUTPUTS[name](item)
            formats += bool(read) and "json-whitespace" not in read
            found |= read
    if formats != 1:
        raise ValueError(f"it has {formats} formats of the answer; give one")
    return found


def _no_effect(value: Any) -> dict[str, Any]:
    """Return nothing: the daemon's only engine for grammars closes objects, and writes no white
    space beyond that of `json-whitespace`.
    """
    _flag(value)
    return {}


_GBNF_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"})
_WHITE_SPACE_CHARACTERS_MAX = 40
"""With more, groups could nest so deep that matching one space takes long."""
_STRUCTURED_OUTPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "json": _guided_json,
    "regex": lambda value: {"regex": value},
    "choice": _guided_choice,
    "grammar": _guided_grammar,
    "json_object": _guided_json_object,
    "structural_tag": lambda value: {"structural-tag": value},
    "whitespace_pattern": _white_space,
    "disable_any_whitespace": _no_effect,
    "disable_additional_properties": _no_effect,
    "disable_fallback": _no_effect,
}
"""By the name of a field of vLLM's `StructuredOutputsParams`, the function that translates it."""

FORMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "token-conditions": _token_conditions,
    "pattern-conditions": _pattern_conditions,
    "semantic-conditions": _semantic_conditions,
    "dynamic-timeout": _dynamic_timeout,
    "grammar-triggers": _grammar_triggers,
    "response-format": _response_format,
    "structured-outputs": _structured_outputs,
    "guided-json": _guided_json,
    "guided-json-object": _guided_json_object,
    "guided-regex": _STRUCTURED_OUTPUTS["regex"],
    "guided-choice": _guided_choice,
    "guided-grammar": _guided_grammar,
    "guided-whitespace-pattern": _white_space,
    "reranking": _reranking,
}
"""By a key's name with hyphens, the function that translates its value to those of parameters;
these are then read.
"""


UNTIL_FULL = "-2 means until the context is full: -1 is used, without ctx-shift"
"""The reason that is reported for an `n-predict` of -2, which also turns `ctx-shift` off."""
CONFIGURED = object()
"""Stands for the value that a parameter has without the request."""


class Sentinel(NamedTuple):
    """A value with a meaning of its own in another runtime, and the value that is *used* for it."""

    value: int
    used: Any
    reason: str


SENTINELS = {
    "n-predict": Sentinel(-2, -1, UNTIL_FULL),
    "n-gpu-layers": Sentinel(-2, -1, "-2 means all layers: -1 is used, as many as fit"),
}
"""By parameter, the sentinel of llama.cpp or Ollama that is out of its range."""
DEFAULT_SENTINEL = Sentinel(-1, CONFIGURED, "-1 means the configured default")
"""That of each other number in wasi_nn_backend, and of some in llama.cpp. Where -1 is within a
parameter's range, it has the meaning in the parameter's description.
"""
REASONS_MAX = 4
"""Changed numbers within one value that its reason names."""
SEEDS = 1 << 32
"""The number of seeds that the samplers have."""
_CACHE_TYPES: dict[int | str, str] = {
    **{0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1"},
    **{8: "q8_0", 20: "iq4_nl", 30: "bf16"},
}
_OTHER_NAMES: dict[str, dict[int | str, str]] = {
    "cache-type-k": _CACHE_TYPES,
    "cache-type-v": _CACHE_TYPES,
    "flash-attn": {"enabled": "on", "disabled": "off"},
    "numa": {0: "off", 1: "distribute", 2: "isolate", 3: "numactl", "disabled": "off"},
    "pooling": {-1: "", 0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"},
    "rope-scaling": {-1: "", 0: "none", 1: "linear", 2: "yarn", 3: "longrope"},
}
"""By parameter whose values are names, the values in WasmEdge and wasi_nn_backend: the numbers of
llama.cpp's enums (`ggml_type`, `ggml_numa_strategy`, `llama_pooling_type`,
`llama_rope_scaling_type`), and other names.
"""


class Clamp:
    """Numbers within one value, clamped to their ranges. `reason` names the first of them."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._clamped = 0

    def __call__(self, item: str, number: float, low: float, high: float) -> float:
        """Return the number nearest to *number* in the range of *item*, and note the change."""
        used = low if number < low else high
        bounds = f"{plain_number(low)} … {plain_number(high)}"
        self.note(f"{item}: {shorten(number)} is outside {bounds}: {plain_number(used)} is used")
        return used

    def note(self, reason: str) -> None:
        """Note another change of the value."""
        self._clamped += 1
        if len(self._reasons) < REASONS_MAX:
            self._reasons.append(reason)

    @property
    def reason(self) -> str:
        """The reason why the value differs from the given one; empty if it does not."""
        more = self._clamped - len(self._reasons)
        return "; ".join(self._reasons) + (f"; and {more} more" if more else "")


def adjust_value(parameter: Parameter, value: Any) -> tuple[Any, str]:
    """Return the value to use for *value*, or `CONFIGURED`, and the reason if they differ. A value
    of the wrong type is returned as it is.
    """
    if isinstance(value, bool):
        return value, ""
    if parameter.name in _OTHER_NAMES:
        return _named_choice(value, _OTHER_NAMES[parameter.name])
    if not isinstance(value, int | float):
        return value, ""
    if parameter.kind not in ("int", "float") or parameter.low <= value <= parameter.high:
        return value, ""
    for sentinel in (SENTINELS.get(parameter.name), DEFAULT_SENTINEL):
        if sentinel is not None and value == sentinel.value:
            return sentinel.used, sentinel.reason
    low, high = plain_number(parameter.low), plain_number(parameter.high)
    used = parameter.low if value < parameter.low else parameter.high
    number = int(used) if parameter.kind == "int" else used
    reason = f"{shorten(value)} is outside {low} … {high}: {plain_number(used)} is used"
    return number, reason


def reduce_seed(parameter: Parameter, value: Any) -> tuple[Any, str]:
    """Return the value to use for a seed and the reason if they differ: a whole number out of the
    range of `seed` is taken modulo 2^32, as programs draw seeds of 64 bits. Values of the wrong
    type are returned as they are.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value, ""
    if parameter.low <= value <= parameter.high or value % 1 != 0:
        return value, ""
    seed = int(value) % SEEDS
    return seed, f"{shorten(value)} is outside 0 … {SEEDS - 1}: {seed} is used, modulo 2^32"


def _named_choice(value: Any, names: Mapping[int | str, str]) -> tuple[Any, str]:
    value = as_whole(value)
    key = value.lower() if isinstance(value, str) else value
    if not isinstance(key, int | str) or key not in names:
        return value, ""
    name = names[key]
    return name, f"{shorten(value)} means {name or 'the default'}"


_REASONS: dict[str, str] = {
    "the setting `sessions-max` decides this": "max-sessions",
    "the setting `idle-timeout-ms` decides this": """
        idle-timeout-ms auto-cleanup auto-cleanup-enabled auto-cleanup-sessions""",
    "the settings `tasks-waiting-max` and `tasks-waiting-user-max` decide this": """
        queue-size queue-warning-threshold queue-reject-threshold auto-queue-cleanup""",
    "each request sets its own timeouts; no setting does": "default-task-timeout-ms",
    "priorities and fair shares are always on; access rules set a `priority-max`": """
        priority-scheduling-enabled fair-scheduling-enabled""",
    "the parameter `slots` of the model's configuration decides this": """
        max-concurrent cont-batching n-sequences""",
    "the settings `kv-ram-bytes` and `kv-disk-bytes` decide this": """
        cache-strategy max-cache-tokens enable-partial-cache-deletion
        enable-token-cache-reuse cache-deletion-strategy""",
    "the setting `memory-bytes` decides this": "max-memory-mb memory-pressure-threshold",
    "the settings `log-level`, `log-levels`, `log-format` and `log-file` decide this": """
        level enable-debug enable-debug-log enable-log timestamps colors file logging verbosity
        log-json""",
    "the setting `step-ms-target` decides this": "batch-processing batch-timeout-ms",
    "the settings `socket` and `socket-mode` and the access rules decide this": """
        port hostname timeout-read timeout-write n-threads-http ssl-key-file ssl-cert-file
        ssl-file-key ssl-file-cert public-path webui endpoint-slots api-key""",
    "the setting `metrics` decides this": "endpoint-metrics endpoint-props",
    "the setting `state-dir` decides this": "slot-save-path",
    "the daemon chooses slots itself": "slot-prompt-similarity",
    "one engine compiles all grammars": "guided-decoding-backend",
    "the configuration names models, by its tables `[models.NAME]`": "model-alias",
    "the daemon has no output to print to; `inferd wasm run` has": "stream-stdout",
    "the daemon decides how to load a model, from the machine and its memory": """
        warmup check-tensors split-mode
        no-kv-offload ubatch-size n-ubatch
        mask-valid mask-valid-batch strict-cpu strict-cpu-batch
        poll poll-batch priority priority-batch attention-type backend-sampling""",
    "the parameters `mmap` and `mlock` of the model's configuration decide this": "load-mode",
    "the parameter `lora` applies adapters": "lora-init-without-apply",
    "a draft model has the context and the devices of its model (`draft-model`)": """
        n-ctx-speculative n-gpu-layers-speculative""",
    "each step has as many drafts as are expected to pay, at most `draft-max`": """
        n-max-speculative n-min-speculative p-split-speculative p-min-speculative
        lookup-cache-static lookup-cache-dynamic""",
    "the embeddings of an image are computed once, and kept": "always-regenerate-image-embd",
    "not supported: control vectors": """
        control-vector-load control-vector-layer-start control-vector-layer-end""",
    "`inferd pull` downloads models; requests name them": """
        model-url hf-token hf-repo hf-file model-path""",
    "a separate call does this": """
        prompt stream stream-options id-slot return-tokens return-progress timings-per-token
        response-fields verbose sse-ping-interval echo n-cmpl n""",
    "the metadata always has this": "include-usage timing-per-token",
    "the parameter `last-n-penalty` decides this": "n-prev",
    "guests write the prompt: a turn with messages has the model's chat template": """
        enable-chat-template llama3 conversation input-prefix input-suffix input-prefix-bos""",
    "the daemon finds equal beginnings of prompts itself": """
        path-prompt-cache prompt-cache-all prompt-cache-ro""",
    "it has no effect in the runtime that defines it either": """
        hellaswag hellaswag-tasks winogrande winogrande-tasks multiple-choice
        multiple-choice-tasks kl-divergence n-pp n-tg n-pl context-files chunk-size
        chunk-separator n-junk i-pos out-file n-out-freq n-save-freq i-chunk process-output
        compute-ppl cvector-outfile cvector-positive-file cvector-negative-file
        cvector-dimre-method n-pca-batch n-pca-iterations ppl-stride ppl-output-type
        runtime context-aware timeout-config semantic-stopping token-filters
        grammar-triggers.patterns max-time-ms
        prompt-file interactive interactive-first interactive-specials simple-io use-color
        multiline-input embd-out embd-sep no-perf no-perf-sampling grp-attn-n grp-attn-w
        n-chunks spm-infill n-print logits-file usage special escape verbose-prompt
        display-prompt is-pp-shared batched-bench-output-jsonl""",
    "not needed: any text and any token can trigger a grammar": """
        preserved-tokens""",
    "not supported (yet): the answer is generated without it": """
        reasoning-control
        generation-prompt chat-format chat-parser""",
}

_REFUSALS: dict[str, str] = {
    "the daemon opens no files for clients: send the image itself": "image",
    "speech is not supported": """
        tts model-vocoder tts-output-file tts-speaker-file hf-repo-vocoder hf-file-vocoder
        model-url-vocoder""",
}


def _by_key(reasons: dict[str, str]) -> dict[str, str]:
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


IGNORED_KEYS = _by_key(_REASONS)
"""The reason by key, written with hyphens."""
REFUSED_KEYS = _by_key(_REFUSALS)
"""Keys that are refused because an answer that ignores them would be wrong: the reason by key,
written with hyphens.
"""
