"""The table of parameters: names, spellings, types, ranges, defaults and descriptions; the JSON schema
of the parameters, and the texts that describe them in tables.

Names are llama.cpp's, with hyphens; `_` and `-` are equivalent. Other spellings are those of
llama-server, WasmEdge and apuslabs/wasi_nn_backend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Literal

import msgspec

from ..embedder import NORMALIZE_MAX, POOLINGS
from ..engine_options import CACHE_TYPES, NUMA_STRATEGIES, ROPE_SCALINGS

Level = Literal["model", "context", "request"]
Kind = Literal[
    "int",
    "float",
    "bool",
    "texts",
    "samplers",
    "biases",
    "shares",
    "text",
    "tokens",
    "triggers",
    "schema",
    "structural-tag",
    "choice",
    "tools",
    "tool-choice",
    "arguments",
    "efforts",
    "answer-form",
    "scales",
]
"""The form in which a value is read; `_TYPES` describes each one."""

SAMPLERS = {
    "penalties": "e",
    "dry": "d",
    "top-n-sigma": "s",
    "top-k": "k",
    "typ-p": "y",
    "top-p": "p",
    "min-p": "m",
    "xtc": "x",
    "temperature": "t",
    "infill": "i",
    "adaptive-p": "a",
}
"""Samplers of a chain, with llama-server's letters (`common/sampling.cpp`)."""
FORMATS = ("json-schema", "grammar", "lark", "regex", "structural-tag")
"""The parameters that give the form of an answer; at most one is set."""
NOT_KEPT_TOKENS = 4
"""Tokens of a context that `n-keep` does not keep, as in llama-server: without them a shift could
drop nothing.
"""
PARAMETERS_HINT = (
    "correct it; `inferd parameters` lists all, `inferd parameters NAME` prints a range"
)


class OverflowPolicy(StrEnum):
    """The parts that a history loses if it does not fit its context: the values of `overflow`."""

    AUTO = "auto"
    SHIFT = "shift"
    DROP_TURNS = "drop-turns"
    TRUNCATE = "truncate"
    ERROR = "error"


SAMPLERS_DEFAULT = tuple(SAMPLERS)[:9]
JSON_LAYOUTS = ("any", "compact", "spaced")
SCHEMA_INFERENCES = ("closed", "types", "none")
DRY_BREAKERS = ("\n", ":", '"', "*")
_COUNT_MAX = 1 << 24
N_PROBS_MAX = 100
EFFORTS = {
    "none": 0,
    "minimal": 512,
    "low": 1024,
    "medium": 8192,
    "high": 24_576,
    "xhigh": -1,
    "max": -1,
}
"""The levels of reasoning that OpenAI's and Anthropic's APIs know, with the tokens of a thought."""
MMPROJ_AUTO, MMPROJ_NONE = "auto", "none"
"""The values of `mmproj` that name no file."""
IMAGE_TOKENS_MAX = 1 << 20
TENSOR_SPLIT_MAX = 16
"""`llama_max_devices`."""


class Parameter(msgspec.Struct, frozen=True):
    """One parameter. `low` and `high` bound numbers, both inclusive; `aliases` are other spellings."""

    name: str
    kind: Kind
    level: Level
    default: Any
    doc: str
    aliases: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("ctx-size", "int", "model", 0, "tokens of one session's context; 0: the model's own, at most 4096", ("n-ctx",), low=0, high=_COUNT_MAX),
    Parameter("batch-size", "int", "model", 512, "maximum number of tokens in one step", ("n-batch",), low=16, high=8192),
    Parameter("threads", "int", "model", 0, "maximum number of threads of a step; 0: the setting `cores` of the daemon", ("n-threads",), low=0, high=512),
    Parameter("n-gpu-layers", "int", "model", -1, "number of layers on GPUs; -1: as many as fit", ("gpu-layers", "ngl"), low=-1, high=100_000),
    Parameter("main-gpu", "int", "model", -1, "the only GPU that holds layers; -1: all GPUs hold some", low=-1, high=TENSOR_SPLIT_MAX - 1),
    Parameter("tensor-split", "shares", "model", [], "proportion of the layers on each GPU; empty: by its free memory"),
    Parameter("cpu-moe", "bool", "model", False, "the experts of all layers stay on the CPU, also of the layers on GPUs: less of a GPU's memory, and slower; only for a model with experts (MoE)"),
    Parameter("n-cpu-moe", "int", "model", 0, "number of first layers whose experts stay on the CPU, as with `cpu-moe`; 0: none", low=0, high=100_000),
    Parameter("threads-batch", "int", "model", 0, "maximum number of threads of a step with several tokens, such as a prompt's; 0: as `threads`", ("n-threads-batch",), low=0, high=512),
    Parameter("cache-type-k", "choice", "model", "f16", "type of the keys in KV states; a quantized one takes less memory", choices=tuple(CACHE_TYPES)),
    Parameter("cache-type-v", "choice", "model", "f16", "type of the values in KV states; a quantized one takes less memory and needs flash attention", choices=tuple(CACHE_TYPES)),
    Parameter("flash-attn", "choice", "model", "auto", "flash attention; auto: as llama.cpp decides if a GPU has layers; on a CPU as measured there, or on with a quantized cache-type-v", choices=("auto", "on", "off")),
    Parameter("swa-full", "bool", "model", False, "layers that attend to a window keep the KV states of the whole context: more memory, and `ctx-shift` works"),
    Parameter("mmap", "bool", "model", True, "map the file into memory; false: read it, which takes longer, and needs no page cache", ("use-mmap",)),
    Parameter("mlock", "bool", "model", False, "lock the weights in memory, within the daemon's limit of locked memory", ("use-mlock",)),
    Parameter("numa", "choice", "model", "off", "distribution of threads over NUMA nodes, as llama.cpp's `--numa`", choices=NUMA_STRATEGIES),
    Parameter("rope-scaling", "choice", "model", "", "scaling of positions (RoPE) for longer contexts than trained; empty: the file's", ("rope-scaling-type",), choices=ROPE_SCALINGS),
    Parameter("rope-freq-base", "float", "model", 0.0, "base frequency of RoPE; 0: the file's", low=0, high=1e11),
    Parameter("rope-freq-scale", "float", "model", 0.0, "factor of RoPE's frequencies, such as 0.5 for twice the context; 0: the file's", low=0, high=1000),
    Parameter("yarn-ext-factor", "float", "model", -1.0, "YaRN's mix of extrapolation; -1: by `rope-scaling`", low=-1, high=1000),
    Parameter("yarn-attn-factor", "float", "model", -1.0, "YaRN's factor of the attention's magnitude; -1: the default", low=-1, high=1000),
    Parameter("yarn-beta-fast", "float", "model", -1.0, "YaRN's low correction dimension; -1: the default", low=-1, high=1000),
    Parameter("yarn-beta-slow", "float", "model", -1.0, "YaRN's high correction dimension; -1: the default", low=-1, high=1000),
    Parameter("yarn-orig-ctx", "int", "model", 0, "context with which a YaRN model was trained; 0: the file's", low=0, high=_COUNT_MAX),
    Parameter("override-kv", "texts", "model", [], "values that replace those in the file's header, each as KEY=TYPE:VALUE with the type int, float, bool or str"),
    Parameter("slots", "int", "model", 4, "sequences decoded in parallel", ("n-parallel", "parallel"), low=1, high=256),
    Parameter("keep-alive", "float", "model", None, "idle time in seconds after which the model is unloaded; -1: only when memory is low", low=-1, high=2_592_000),
    Parameter("chat-template", "text", "model", "", "chat template in Jinja that replaces the one in the model file"),
    Parameter("chat-template-file", "text", "model", "", "file with the chat template, read at each load"),
    Parameter("tool-format", "answer-form", "model", "", "form of reasoning and tool calls in answers, which replaces the one derived from the chat template: a name (hermes, llama, â¦), or a map as `inferd show --template` prints it"),
    Parameter("mmproj", "text", "model", MMPROJ_AUTO, "file of the projector with which the model reads images and sounds; auto: the one beside the model's file whose name contains `mmproj` (see media.md), if exactly one fits; none, or empty in the configuration: none"),
    Parameter("draft-model", "text", "model", "", "second, smaller model with the same vocabulary, which drafts for turns with the `speculation` draft: the name of a model or, in the configuration, also its file; empty: none; see scheduling.md"),
    Parameter("similarity-model", "text", "model", "", "model whose embeddings `stop-similarity` compares while it is loaded; empty: none"),
    Parameter("similarity-wait-ms", "int", "model", 1000, "maximum time in milliseconds that a turn waits for one comparison", low=1, high=60_000),
    Parameter("system-prompt", "text", "context", "", "system message with which a chat begins if its own messages have none; empty: none"),
    Parameter("append", "bool", "context", False, "set_input(0) adds to the history instead of replacing it"),
    Parameter("cache-prompt", "bool", "request", True, "reuse existing KV state; false: compute the whole prompt", ("enable-prompt-cache",)),
    Parameter("image-tokens-max", "int", "request", 0, "maximum number of tokens of an image, to which it is scaled down before it is encoded, where the message names none; 0: the projector's own", low=0, high=IMAGE_TOKENS_MAX),
    Parameter("retention-ms", "int", "request", -1, "idle time in milliseconds after which a session's prompt is computed again; -1: no limit", low=-1, high=2_592_000_000),
    Parameter("n-predict", "int", "request", -1, "maximum number of tokens to generate; -1: the rest of the context", ("max-tokens", "max-completion-tokens"), low=-1, high=_COUNT_MAX),
    Parameter("stop", "texts", "request", [], "texts that end the turn and are removed from the output", ("stop-sequences",)),
    Parameter("reverse-prompt", "texts", "request", [], "texts that end the turn and stay in the output", ("antiprompt",)),
    Parameter("stop-tokens", "tokens", "request", [], "token ids that end the turn; their text is removed from the output", ("stop-token-ids",)),
    Parameter("stop-patterns", "texts", "request", [], "regular expressions that end the turn at a match, which is removed from the output"),
    Parameter("stop-complete", "texts", "request", [], "ends the turn when one of these is complete: `json`, `fence`, `sentence`"),
    Parameter("stop-grammar", "bool", "request", False, "ends the turn as soon as its grammar accepts the answer"),
    Parameter("stop-repetition", "float", "request", 0.0, "ends the turn when this share of the last 4-grams occurred before; 0: off", low=0, high=1),
    Parameter("stop-repetition-window", "int", "request", 128, "number of last tokens that stop-repetition considers", low=8, high=4096),
    Parameter("stop-surprisal", "float", "request", 0.0, "ends the turn when the mean surprisal of its last tokens exceeds this number of nats; 0: off", low=0, high=100),
    Parameter("stop-surprisal-window", "int", "request", 32, "number of last tokens that stop-surprisal considers", low=1, high=4096),
    Parameter("stop-similarity", "text", "request", "", "ends the turn at a sentence whose embedding is similar to that of this text, if `similarity-model` is loaded; empty: off", ("similarity-text",)),
    Parameter("stop-similarity-threshold", "float", "request", 0.8, "minimum cosine similarity that ends the turn", ("similarity-threshold",), low=0, high=1),
    Parameter("n-indent", "int", "request", 0, "ends the turn at a line, after the first, with fewer leading spaces and tabs; 0: off", low=0, high=1000),
    Parameter("t-max-prompt-ms", "int", "request", -1, "maximum time in milliseconds to compute the prompt, from the first slot on; 0 and -1: no limit", low=-1, high=2_592_000_000),
    Parameter("t-max-predict-ms", "int", "request", -1, "time in milliseconds after the first token from which the turn ends at the next line; 0 and -1: no limit", low=-1, high=2_592_000_000),
    Parameter("timeout-base-ms", "int", "request", -1, "maximum time in milliseconds of a turn from its first slot on, without the time for each token; -1: no limit", low=-1, high=2_592_000_000),
    Parameter("timeout-token-ms", "float", "request", 0.0, "additional milliseconds for each token of prompt and answer", low=0, high=1_000_000),
    Parameter("timeout-max-ms", "int", "request", -1, "upper limit in milliseconds of `timeout-base-ms` plus the time of all tokens; -1: no limit", low=-1, high=2_592_000_000),
    Parameter("grammar-lazy", "bool", "request", False, "true: the grammar starts at a trigger; false: the grammar applies from the beginning, even with triggers"),
    Parameter("grammar-triggers", "triggers", "request", [], "triggers that start a lazy grammar: texts, or pairs of `token`, `word`, `pattern` or `pattern-full` and a value"),
    Parameter("seed", "int", "request", -1, "seed of the random generator; -1: a random seed, returned in the metadata; others out of the range are taken modulo 2^32", low=-1, high=(1 << 32) - 1),
    Parameter("samplers", "samplers", "request", list(SAMPLERS_DEFAULT), "samplers in order, by names or letters: " + ", ".join(f"{n} ({c})" for n, c in SAMPLERS.items())),
    Parameter("temp", "float", "request", 0.8, "temperature; 0 is greedy", ("temperature",), low=0, high=100),
    Parameter("dynatemp-range", "float", "request", 0.0, "the temperature follows the entropy within `temp` ± this; 0: off", low=0, high=100),
    Parameter("dynatemp-exponent", "float", "request", 1.0, "exponent of the normalised entropy in the dynamic temperature", low=0, high=100),
    Parameter("top-k", "int", "request", 40, "keep the k most probable tokens; 0 and -1: all", low=-1, high=_COUNT_MAX),
    Parameter("top-p", "float", "request", 0.95, "keep the most probable tokens up to this cumulative probability", low=0, high=1),
    Parameter("min-p", "float", "request", 0.05, "drop tokens below this share of the highest probability", low=0, high=1),
    Parameter("typ-p", "float", "request", 1.0, "locally typical sampling; 1 is off", ("typical-p", "typical"), low=0, high=1),
    Parameter("top-n-sigma", "float", "request", -1.0, "keep logits within this number of standard deviations of the highest; 0 and less: off", ("top-nsigma",), low=-1, high=1000),
    Parameter("min-keep", "int", "request", 0, "minimum number of tokens that top-p, min-p, typ-p and xtc keep", low=0, high=_COUNT_MAX),
    Parameter("xtc-probability", "float", "request", 0.0, "chance to drop the most probable tokens except the last of them; 0: off", low=0, high=1),
    Parameter("xtc-threshold", "float", "request", 0.1, "minimum probability of tokens that xtc drops; above 0.5: off", low=0, high=1),
    Parameter("repeat-penalty", "float", "request", 1.0, "penalty of tokens that occurred; 1 is off", ("repetition-penalty",), low=0.01, high=100),
    Parameter("presence-penalty", "float", "request", 0.0, "penalty of tokens that occurred at least once", low=-100, high=100),
    Parameter("frequency-penalty", "float", "request", 0.0, "penalty of tokens by their number of occurrences", low=-100, high=100),
    Parameter("last-n-penalty", "int", "request", 64, "number of last tokens that the penalties consider; -1: the context", ("repeat-last-n", "penalty-last-n"), low=-1, high=_COUNT_MAX),
    Parameter("dry-multiplier", "float", "request", 0.0, "penalty of tokens that continue a repetition (DRY); 0: off", ("dry-multipier",), low=0, high=1000),
    Parameter("dry-base", "float", "request", 1.75, "growth of that penalty for each token of the repetition; below 1: 1.75", low=0, high=1000),
    Parameter("dry-allowed-length", "int", "request", 2, "length of a repetition without penalty", low=0, high=_COUNT_MAX),
    Parameter("dry-penalty-last-n", "int", "request", 64, "number of last tokens that DRY considers; -1: the context; 0: off", ("dry-last-n-penalty",), low=-1, high=_COUNT_MAX),
    Parameter("dry-sequence-breakers", "texts", "request", list(DRY_BREAKERS), "texts that end a repetition; at least one, each at most 40 characters", ("dry-sequence-breaker",)),
    Parameter("mirostat", "int", "request", 0, "1 or 2: version of mirostat that samples, after temperature alone; 0: off", low=0, high=2),
    Parameter("mirostat-tau", "float", "request", 5.0, "target surprisal of mirostat, in bits", ("mirostat-ent",), low=0, high=1000),
    Parameter("mirostat-eta", "float", "request", 0.1, "learning rate of mirostat", ("mirostat-lr",), low=0, high=1),
    Parameter("adaptive-target", "float", "request", -1.0, "target probability of adaptive-p, if the chain has it; below 0: off", low=-1, high=1),
    Parameter("adaptive-decay", "float", "request", 0.9, "decay of adaptive-p's running mean", low=0, high=0.99),
    Parameter("logit-bias", "biases", "request", [], "pairs of a token or a text and a number added to its logit; false: the token is never sampled"),
    Parameter("grammar", "text", "request", "", "GBNF grammar of the answer, which may end where the grammar is complete"),
    Parameter("json-schema", "schema", "request", "", "JSON schema of the answer, compiled to a grammar; unsupported keywords are rejected with their path; {}: any object; see json-schema.md"),
    Parameter("json-whitespace", "choice", "request", "spaced", "white space in the JSON of a `json-schema`: spaced, `, ` and `: `; compact, none; any, at most 64 characters between two symbols", choices=JSON_LAYOUTS),
    Parameter("schema-infer", "choice", "request", "closed", "keywords that are added where a JSON schema leaves them out; closed: a schema with `properties` is an object, one with `items` an array, and objects have only the properties that the schema names, unless it allows for others; types: only the types; none: as the standard says; see json-schema.md", choices=SCHEMA_INFERENCES),
    Parameter("schema-lenient", "bool", "request", False, "leave out the constraints of `json-schema` that no grammar can keep, and list them in the metadata (`adjusted`); false: refuse the schema"),
    Parameter("lark", "text", "request", "", "Lark grammar of the answer, in llguidance's dialect; see grammars.md"),
    Parameter("regex", "text", "request", "", "regular expression that the whole answer matches; see grammars.md"),
    Parameter("structural-tag", "structural-tag", "request", "", "free text with parts that follow a schema: `structures` of `begin`, `schema` and `end`, with `triggers`; see grammars.md"),
    Parameter("jump-forward", "bool", "request", True, "tokens that the grammar forces are not sampled, and several of them are computed at once; false: each token is sampled"),
    Parameter("speculation", "choice", "request", "auto", "drafter that proposes the next tokens, so that one step can verify several; the text stays the same, and a step has drafts only if that is expected to be faster; ngram: repeats what followed the last tokens where they occurred before in the session; draft: the model's `draft-model`; mtp: the NextN layers of the model, which its own `speculation` = mtp in the configuration loads; auto: ngram; off: none; see scheduling.md", choices=("auto", "ngram", "draft", "mtp", "off")),
    Parameter("draft-max", "int", "request", 16, "maximum number of tokens of an answer that are drafted for one step; 0: none", ("draft-n",), low=0, high=64),
    Parameter("prediction", "text", "request", "", "text that the answer is expected to repeat in large part, such as a file that is edited: the drafter ngram proposes it, from its beginning and wherever the answer returns to it"),
    Parameter("n-probs", "int", "request", 0, "number of top tokens returned with each sampled token, with the model's logprobs; 0: none", ("logprobs",), low=0, high=N_PROBS_MAX),
    Parameter("prompt-logprobs", "int", "request", None, "number of top tokens returned with each token of the prompt, with the model's logprobs; the whole prompt is computed; unset: no logprobs of the prompt", low=0, high=N_PROBS_MAX),
    Parameter("post-sampling-probs", "bool", "request", False, "return probabilities after the samplers instead"),
    Parameter("tools", "tools", "request", [], "functions for the chat template, as OpenAI defines them: a list, or its JSON text; up to 128, of 256 KiB, with names of up to 128 characters"),
    Parameter("tool-choice", "tool-choice", "request", "auto", "calls of `tools` in the answer: auto, none, required, or a map that names a function or (`allowed_tools`) those that may be called, as OpenAI defines them; a required call follows the function's schema, and has no arguments beside its `properties` unless the schema allows for them"),
    Parameter("parallel-tool-calls", "bool", "request", True, "the answer may have several calls; false: one"),
    Parameter("continue-final-message", "bool", "request", False, "the answer continues the last of the messages, which is the assistant's; grammars, tool calls and reasoning include its text"),
    Parameter("parse-tool-calls", "bool", "request", True, "return the calls of `tools` apart from the text; false: they stay in the text, as the model writes them"),
    Parameter("chat-template-kwargs", "arguments", "request", {}, "arguments of the chat template, such as enable_thinking: a map, or its JSON text; up to 64, of 64 KiB"),
    Parameter("reasoning-format", "choice", "request", "none", "deepseek (or auto): text between `<think>` and `</think>` before the answer is returned as reasoning; none: as text", choices=("none", "auto", "deepseek")),
    Parameter("reasoning-budget", "int", "request", -1, "maximum number of tokens of a thought; then its end is added to the answer, behind `reasoning-budget-message`; 0: no thought; -1: no limit", ("reasoning-budget-tokens", "thinking-budget-tokens"), low=-1, high=_COUNT_MAX),
    Parameter("reasoning-budget-message", "text", "request", "", "text that is added to the answer before a forced end of reasoning; at most 1024 characters"),
    Parameter("reasoning-effort", "choice", "request", "", "level of reasoning, which limits a thought to its number in `reasoning-efforts`, unless `reasoning-budget` is smaller; empty: no level", choices=("", *EFFORTS)),
    Parameter("reasoning-efforts", "efforts", "request", EFFORTS, "maximum number of tokens of a thought by level; -1: no limit; levels that a map lacks keep their defaults"),
    Parameter("ignore-eos", "bool", "request", False, "continue after the end of generation"),
    Parameter("lora", "scales", "request", None, "adapters and their scales, from the next turn on: a map of names to numbers, or a list of names, of pairs, or of maps with `id` and `scale`; others are off; unset: the scales of the configuration"),
    Parameter("overflow", "choice", "request", "auto", "treatment of a full context: `shift` drops the oldest tokens behind `n-keep`, also within an answer (approximate); `drop-turns` drops whole old turns behind the system message, before an answer; `truncate` drops the middle of the prompt behind `n-keep`; `error` refuses the prompt; `auto`: with `ctx-shift` as `shift`, for messages added to a session's chat as `drop-turns`, else as `error`", choices=tuple(policy.value for policy in OverflowPolicy)),
    Parameter("ctx-shift", "bool", "request", False, "drop old tokens when the context is full within an answer, and continue (approximate); without `overflow`, true also means `overflow` = shift", ("context-shift", "context-shifting")),
    Parameter("n-keep", "int", "request", 0, "number of tokens at the start that are kept when tokens are dropped; -1: the whole prompt. A shortened prompt keeps at most half of the context", ("keep", "n-keep-tokens"), low=-1, high=_COUNT_MAX),
    Parameter("n-discard", "int", "request", 0, "number of tokens that a shift drops; 0: half of those it may drop", ("n-discard-tokens",), low=0, high=_COUNT_MAX),
    Parameter("cache-reuse", "int", "request", 0, "minimum run of equal tokens that is reused by shifting (approximate); 0: off", ("n-cache-reuse",), low=0, high=_COUNT_MAX),
    Parameter("embedding", "bool", "request", False, "`compute` returns an embedding of the prompt as JSON in output 0: `n_embedding` and `embedding`"),
    Parameter("pooling", "choice", "request", "", "pooling of a text's token embeddings: " + ", ".join(POOLINGS) + " (scores of a reranking model); empty: the model's default, else mean", ("pooling-type",), choices=("", *POOLINGS)),
    Parameter("embd-normalize", "int", "request", 2, "norm of an embedding: -1 none, 0 the largest number is 32760, 1 taxicab, 2 euclidean, p > 2 p-norm; ignored with pooling none and rank", ("normalize",), low=-1, high=NORMALIZE_MAX),
)  # fmt: skip

REQUESTABLE = ("ctx-size", "n-gpu-layers", "main-gpu", "tensor-split", "mmproj", "draft-model")
"""Parameters of a model that a call may set for its load, unless the configuration does."""
BY_NAME: dict[str, Parameter] = {p.name: p for p in PARAMETERS}
BY_SPELLING: dict[str, Parameter] = {a: p for p in PARAMETERS for a in (p.name, *p.aliases)}


def differing_values(requested: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return by name the *values* in force, or else the defaults, that differ from the *requested*
    values of a model's parameters.
    """
    found = {name: values.get(name, BY_NAME[name].default) for name in requested}
    return {n: value for n, value in found.items() if not _is_met(n, requested[n], value)}


def _is_met(name: str, requested: Any, value: Any) -> bool:
    if name == "n-gpu-layers" and requested == -1:
        return bool(value != 0)  # as many as fit; no layers mean that there is no GPU
    if name == "mmproj":
        return _is_projector_met(requested, value)
    return bool(requested == value or (name == "threads" and requested == 0))


def _is_projector_met(requested: str, value: str) -> bool:
    """Return whether a requested projector is the one in force, whose folder a client may know by
    another name.
    """
    is_file = value not in (MMPROJ_AUTO, MMPROJ_NONE)
    if requested == MMPROJ_NONE:
        return not is_file
    named = PurePath(requested).name
    return requested in ("", MMPROJ_AUTO) or (is_file and named == PurePath(value).name)


_TEXT_OR_LIST = ["string", "array"]
_TYPES: dict[Kind, tuple[str, dict[str, Any]]] = {
    "int": ("int", {"type": "integer"}),
    "float": ("float", {"type": "number"}),
    "bool": ("bool", {"type": "boolean"}),
    "text": ("text", {"type": "string"}),
    "texts": ("text, or array of texts", {"type": _TEXT_OR_LIST, "items": {"type": "string"}}),
    "samplers": (
        "array of names, or letters",
        {"type": _TEXT_OR_LIST, "items": {"enum": list(SAMPLERS)}},
    ),
    "biases": ("array of pairs, or map", {"type": ["array", "object"]}),
    "shares": (
        "array of numbers, or text as 3,2",
        {"type": _TEXT_OR_LIST, "items": {"type": "number"}},
    ),
    "tokens": (
        "int, or array of ints",
        {"type": ["integer", "array"], "items": {"type": "integer", "minimum": 0}},
    ),
    "triggers": (
        "text, or array of texts, pairs and objects",
        {"type": ["string", "array", "object"]},
    ),
    "schema": ("object, or its JSON text", {"type": ["object", "boolean", "string"]}),
    "structural-tag": ("object, or its JSON text", {"type": ["object", "string"]}),
    "choice": ("name", {"type": "string"}),
    "tools": ("array of tools, or text", {"type": _TEXT_OR_LIST, "items": {"type": "object"}}),
    "tool-choice": ("name, or map", {"type": ["string", "object"]}),
    "arguments": ("map, or text", {"type": ["string", "object"]}),
    "efforts": (
        "map of ints",
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": -1}},
    ),
    "answer-form": ("name, or map", {"type": ["string", "object"]}),
    "scales": ("map of numbers, or array", {"type": ["object", "array", "null"]}),
}
"""For each kind, the words for its type in tables, and its JSON schema."""


def json_schema(parameters: Sequence[Parameter] = PARAMETERS) -> dict[str, Any]:
    """Return a JSON schema of parameters by name; it does not allow for other spellings."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "parameters of inferd",
        "type": "object",
        "properties": {p.name: _property(p) for p in parameters},
    }


def _property(p: Parameter) -> dict[str, Any]:
    bounds = {"minimum": p.low, "maximum": p.high}
    finite = {
        key: int(value) if value == int(value) else value
        for key, value in bounds.items()
        if math.isfinite(value)
    }
    choices = {"enum": list(p.choices)} if p.choices else {}
    return {**_TYPES[p.kind][1], **choices, **finite, "default": p.default, "description": p.doc}


def columns(p: Parameter) -> tuple[str, str, str, str, str, str, str]:
    """Return name, level, other spellings, type, default, range and meaning as texts."""
    bounds = f"{p.low:.10g} … {p.high:.10g}" if p.kind in ("int", "float") else ""
    default = json.dumps(p.default)
    return p.name, p.level, ", ".join(p.aliases), _TYPES[p.kind][0], default, bounds, p.doc
