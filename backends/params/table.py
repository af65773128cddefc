"""The table of parameters: one row each, from which everything that knows parameters is made.

Names are llama.cpp's, with hyphens; `_` and `-` are the same. Other spellings are those of
llama-server, WasmEdge and apuslabs/wasi_nn_backend.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from ..embedder import NORMALIZE_MAX, POOLINGS

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
    "choice",
    "tools",
    "arguments",
    "scales",
]
"""How a value is read: *texts* takes one text, too; *samplers* names or letters; *biases* pairs of
a token or text and a number or false, or a map of them; *shares* numbers, or a text of them;
*tokens* one number, too; *triggers* texts, or pairs of a kind and a value, or objects with both;
*schema* a JSON schema, or its JSON text; *choice* one of the names in `choices`; *tools* and
*arguments* JSON for a chat template; *scales* a map of names to numbers, or a list of names, pairs
or maps.
"""

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
"""What a chain is made of, with llama-server's letters (`common/sampling.cpp`)."""
SAMPLERS_DEFAULT = tuple(SAMPLERS)[:9]
DRY_BREAKERS = ("\n", ":", '"', "*")
_COUNT_MAX = 1 << 24
N_PROBS_MAX = 100
TENSOR_SPLIT_MAX = 16
"""`llama_max_devices`."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `low` and `high` bound numbers, both inclusive; `aliases` are other spellings."""

    name: str
    kind: Kind
    level: Level
    default: Any
    doc: str
    low: float = -math.inf
    high: float = math.inf
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


def _row(
    name: str,
    kind: Kind,
    level: Level,
    default: Any,
    doc: str,
    *aliases: str,
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
) -> Parameter:
    return Parameter(
        name=name,
        kind=kind,
        level=level,
        default=default,
        doc=doc,
        low=low,
        high=high,
        aliases=aliases,
        choices=choices,
    )


PARAMETERS: tuple[Parameter, ...] = (
    _row("ctx-size", "int", "model", 0, "tokens of one session's context; 0: the model's own, at most 4096", "n-ctx", low=0, high=_COUNT_MAX),
    _row("batch-size", "int", "model", 512, "rows of one step, at most", "n-batch", low=16, high=8192),
    _row("threads", "int", "model", 0, "threads of a step; 0: the cores of the configuration", "n-threads", low=0, high=512),
    _row("n-gpu-layers", "int", "model", -1, "layers that run on GPUs; -1: as many as fit", "gpu-layers", "ngl", low=-1, high=100_000),
    _row("main-gpu", "int", "model", -1, "the one GPU that has the layers; -1: all have some", low=-1, high=TENSOR_SPLIT_MAX - 1),
    _row("tensor-split", "shares", "model", [], "what each GPU has of the layers, in proportion; empty: by its free memory"),
    _row("slots", "int", "model", 4, "sequences decoded side by side", "n-parallel", "parallel", low=1, high=256),
    _row("keep-alive", "float", "model", None, "seconds that the model stays when nobody uses it; -1: until memory is short", low=-1, high=2_592_000),
    _row("chat-template", "text", "model", "", "a chat template in Jinja, instead of the file's own"),
    _row("chat-template-file", "text", "model", "", "the file that it is read from, at each load"),
    _row("similarity-model", "text", "model", "", "the model whose embeddings `stop-similarity` compares, while that is loaded; empty: none"),
    _row("similarity-wait-ms", "int", "model", 1000, "milliseconds that a turn waits for one comparison, at most", low=1, high=60_000),
    _row("append", "bool", "context", False, "set_input(0) adds to the history instead of replacing it"),
    _row("cache-prompt", "bool", "request", True, "KV state that is there is used; false: the prompt is computed anew", "enable-prompt-cache"),
    _row("retention-ms", "int", "request", -1, "milliseconds; a session that rested for longer has its prompt computed anew; -1: no bound", low=-1, high=2_592_000_000),
    _row("n-predict", "int", "request", -1, "tokens to generate, at most; -1: what the context has left", "max-tokens", "max-completion-tokens", low=-1, high=_COUNT_MAX),
    _row("stop", "texts", "request", [], "texts that end the turn; cut from the output", "stop-sequences"),
    _row("reverse-prompt", "texts", "request", [], "texts that end the turn; kept in the output", "antiprompt"),
    _row("stop-tokens", "tokens", "request", [], "token ids that end the turn; their text is cut", "stop-token-ids"),
    _row("stop-patterns", "texts", "request", [], "regular expressions that end the turn where they match; the match is cut"),
    _row("stop-complete", "texts", "request", [], "the turn ends when this is complete: `json`, `fence`, `sentence`"),
    _row("stop-grammar", "bool", "request", False, "the turn ends as soon as its grammar may be complete"),
    _row("stop-repetition", "float", "request", 0.0, "the turn ends when this share of the last 4-grams is there already; 0: off", low=0, high=1),
    _row("stop-repetition-window", "int", "request", 128, "tokens that stop-repetition looks back on", low=8, high=4096),
    _row("stop-surprisal", "float", "request", 0.0, "the turn ends when the mean surprise of its last tokens is beyond this, in nats; 0: off", low=0, high=100),
    _row("stop-surprisal-window", "int", "request", 32, "tokens that stop-surprisal looks back on", low=1, high=4096),
    _row("stop-similarity", "text", "request", "", "the turn ends with a sentence whose embedding is close to that of this text, where `similarity-model` is loaded; empty: off", "similarity-text"),
    _row("stop-similarity-threshold", "float", "request", 0.8, "the cosine from which it is close", "similarity-threshold", low=0, high=1),
    _row("n-indent", "int", "request", 0, "the turn ends at a line, after the first, that begins with fewer spaces and tabs; 0: off", low=0, high=1000),
    _row("t-max-prompt-ms", "int", "request", -1, "milliseconds that the prompt may take from its first slot on; then the turn ends; 0 and -1: no bound", low=-1, high=2_592_000_000),
    _row("t-max-predict-ms", "int", "request", -1, "milliseconds from the first token on after which the turn ends with the next line; 0 and -1: no bound", low=-1, high=2_592_000_000),
    _row("timeout-base-ms", "int", "request", -1, "milliseconds that a turn may take from its first slot on, beside those for each token; -1: no bound", low=-1, high=2_592_000_000),
    _row("timeout-token-ms", "float", "request", 0.0, "milliseconds more for each token of prompt and answer", low=0, high=1_000_000),
    _row("timeout-max-ms", "int", "request", -1, "milliseconds that these are at most; -1: no bound", low=-1, high=2_592_000_000),
    _row("grammar-lazy", "bool", "request", False, "true: a trigger is to wake the grammar; false, where it is said: none is needed"),
    _row("grammar-triggers", "triggers", "request", [], "what wakes a grammar that sleeps until then: texts, or pairs of `token`, `word`, `pattern` or `pattern-full` and its value"),
    _row("seed", "int", "request", -1, "seed of the generator; -1: a random one, told in the metadata", low=-1, high=(1 << 32) - 1),
    _row("samplers", "samplers", "request", list(SAMPLERS_DEFAULT), "the chain of samplers, in order, by names or letters: " + ", ".join(f"{n} ({c})" for n, c in SAMPLERS.items())),
    _row("temp", "float", "request", 0.8, "temperature; 0 is greedy", "temperature", low=0, high=100),
    _row("dynatemp-range", "float", "request", 0.0, "the temperature follows the entropy within `temp` ± this; 0: off", low=0, high=100),
    _row("dynatemp-exponent", "float", "request", 1.0, "how it follows: the normalised entropy to this power", low=0, high=100),
    _row("top-k", "int", "request", 40, "keep the k likeliest tokens; 0 and -1: all", low=-1, high=_COUNT_MAX),
    _row("top-p", "float", "request", 0.95, "keep the likeliest tokens up to this probability", low=0, high=1),
    _row("min-p", "float", "request", 0.05, "drop tokens below this share of the likeliest one", low=0, high=1),
    _row("typ-p", "float", "request", 1.0, "locally typical sampling; 1 is off", "typical-p", "typical", low=0, high=1),
    _row("top-n-sigma", "float", "request", -1.0, "keep logits within so many standard deviations of the highest; 0 and less: off", "top-nsigma", low=-1, high=1000),
    _row("min-keep", "int", "request", 0, "tokens that top-p, min-p, typ-p and xtc leave at least", low=0, high=_COUNT_MAX),
    _row("xtc-probability", "float", "request", 0.0, "chance that the likeliest tokens are left out, but for the last of them; 0: off", low=0, high=1),
    _row("xtc-threshold", "float", "request", 0.1, "probability from which xtc leaves tokens out; above 0.5: off", low=0, high=1),
    _row("repeat-penalty", "float", "request", 1.0, "penalty of tokens seen; 1 is off", "repetition-penalty", low=0.01, high=100),
    _row("presence-penalty", "float", "request", 0.0, "penalty of tokens seen at all", low=-100, high=100),
    _row("frequency-penalty", "float", "request", 0.0, "penalty of tokens by their count", low=-100, high=100),
    _row("last-n-penalty", "int", "request", 64, "tokens that the penalties look back on; -1: the context", "repeat-last-n", "penalty-last-n", low=-1, high=_COUNT_MAX),
    _row("dry-multiplier", "float", "request", 0.0, "penalty of tokens that would go on with a repetition (DRY); 0: off", "dry-multipier", low=0, high=1000),
    _row("dry-base", "float", "request", 1.75, "its growth for each token that the repetition is longer; below 1: 1.75", low=0, high=1000),
    _row("dry-allowed-length", "int", "request", 2, "tokens that a repetition may have", low=0, high=_COUNT_MAX),
    _row("dry-penalty-last-n", "int", "request", 64, "tokens that DRY looks back on; -1: the context; 0: off", "dry-last-n-penalty", low=-1, high=_COUNT_MAX),
    _row("dry-sequence-breakers", "texts", "request", list(DRY_BREAKERS), "texts at which a repetition ends; not none, of 40 characters at most", "dry-sequence-breaker"),
    _row("mirostat", "int", "request", 0, "1 or 2: this version of mirostat draws, after the temperature alone; 0: off", low=0, high=2),
    _row("mirostat-tau", "float", "request", 5.0, "the surprise that mirostat aims at, in bits", "mirostat-ent", low=0, high=1000),
    _row("mirostat-eta", "float", "request", 0.1, "its learning rate", "mirostat-lr", low=0, high=1),
    _row("adaptive-target", "float", "request", -1.0, "the probability that adaptive-p aims at, where the chain has it; below 0: off", low=-1, high=1),
    _row("adaptive-decay", "float", "request", 0.9, "how slowly adaptive-p forgets", low=0, high=0.99),
    _row("logit-bias", "biases", "request", [], "pairs of a token or a text and what is added to its logit; false: it is never drawn"),
    _row("grammar", "text", "request", "", "GBNF that the answer follows; it may end where the grammar is complete, and must where nothing can follow"),
    _row("json-schema", "schema", "request", "", "JSON schema that the answer fits: a grammar is made of it, and what none can say is refused by its path; {}: any object; see json-schema.md"),
    _row("n-probs", "int", "request", 0, "likeliest tokens that are told beside each drawn one, with the logarithms of the model's own probabilities; 0: none", "logprobs", low=0, high=N_PROBS_MAX),
    _row("post-sampling-probs", "bool", "request", False, "what is told are the probabilities among what the samplers have left"),
    _row("tools", "tools", "request", [], "functions that the chat template tells the model of, as OpenAI defines them: a list, or its JSON text; up to 128, of 256 KiB"),
    _row("chat-template-kwargs", "arguments", "request", {}, "the chat template's own arguments, such as enable_thinking: a map, or its JSON text; up to 64, of 64 KiB"),
    _row("reasoning-format", "choice", "request", "none", "deepseek (auto is the same): what stands between `<think>` and `</think>` before the answer is told apart from it; none: it is text", choices=("none", "auto", "deepseek")),
    _row("ignore-eos", "bool", "request", False, "go on after the end of generation"),
    _row("lora", "scales", "request", None, "adapters and their scales, from the next turn on: a map of names to numbers, or a list of names, of pairs, or of maps with `id` and `scale`; what is not named is off; unset: the scales of the configuration"),
    _row("ctx-shift", "bool", "request", False, "a full context drops old tokens and goes on (approximate)", "context-shift", "context-shifting"),
    _row("n-keep", "int", "request", 0, "tokens at the start that ctx-shift keeps; -1: the whole prompt", "keep", "n-keep-tokens", low=-1, high=_COUNT_MAX),
    _row("n-discard", "int", "request", 0, "tokens that ctx-shift drops at once; 0: half of what it may", "n-discard-tokens", low=0, high=_COUNT_MAX),
    _row("cache-reuse", "int", "request", 0, "shortest run of equal tokens that is reused by shifting (approximate); 0: off", "n-cache-reuse", low=0, high=_COUNT_MAX),
    _row("embedding", "bool", "request", False, "`compute` makes an embedding of the prompt and no answer; output 0 is then JSON: `n_embedding` and `embedding`"),
    _row("pooling", "choice", "request", "", "how a text's rows become its embedding: " + ", ".join(POOLINGS) + " (a reranking model's scores); empty: the model's own, else mean", "pooling-type", choices=("", *POOLINGS)),
    _row("embd-normalize", "int", "request", 2, "norm of an embedding: -1 none, 0 the greatest number is 32760, 1 taxicab, 2 euclidean, p > 2 p-norm; rows (pooling none) and ranks have none", "normalize", low=-1, high=NORMALIZE_MAX),
)  # fmt: skip

BY_NAME: dict[str, Parameter] = {p.name: p for p in PARAMETERS}
BY_SPELLING: dict[str, Parameter] = {a: p for p in PARAMETERS for a in (p.name, *p.aliases)}
