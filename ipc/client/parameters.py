"""The parameters of turns.

`make docs` writes this file from the table of parameters; do not edit it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class Parameters(TypedDict, total=False):
    """The parameters of turns as keywords; docs/parameters.md describes them."""

    system_prompt: str
    """System message with which a chat begins if its own messages have none; empty: none."""
    append: bool
    """set_input(0) adds to the history instead of replacing it."""
    cache_prompt: bool
    """Reuse existing KV state; false: compute the whole prompt."""
    image_tokens_max: int
    """Maximum number of tokens of an image, to which it is scaled down before it is encoded,
    where the message names none; 0: the projector's own.
    """
    retention_ms: int
    """Idle time in milliseconds after which a session's prompt is computed again; -1: no limit."""
    n_predict: int
    """Maximum number of tokens to generate; -1: the rest of the context."""
    stop: str | Sequence[str]
    """Texts that end the turn and are removed from the output."""
    reverse_prompt: str | Sequence[str]
    """Texts that end the turn and stay in the output."""
    stop_tokens: int | Sequence[int]
    """Token ids that end the turn; their text is removed from the output."""
    stop_patterns: str | Sequence[str]
    """Regular expressions that end the turn at a match, which is removed from the output."""
    stop_complete: str | Sequence[str]
    """Ends the turn when one of these is complete: `json`, `fence`, `sentence`."""
    stop_grammar: bool
    """Ends the turn as soon as its grammar accepts the answer."""
    stop_repetition: float
    """Ends the turn when this share of the last 4-grams occurred before; 0: off."""
    stop_repetition_window: int
    """Number of last tokens that stop-repetition considers."""
    stop_surprisal: float
    """Ends the turn when the mean surprisal of its last tokens exceeds this number of nats; 0:
    off.
    """
    stop_surprisal_window: int
    """Number of last tokens that stop-surprisal considers."""
    stop_similarity: str
    """Ends the turn at a sentence whose embedding is similar to that of this text, if
    `similarity-model` is loaded; empty: off.
    """
    stop_similarity_threshold: float
    """Minimum cosine similarity that ends the turn."""
    n_indent: int
    """Ends the turn at a line, after the first, with fewer leading spaces and tabs; 0: off."""
    t_max_prompt_ms: int
    """Maximum time in milliseconds to compute the prompt, from the first slot on; 0 and -1: no
    limit.
    """
    t_max_predict_ms: int
    """Time in milliseconds after the first token from which the turn ends at the next line; 0
    and -1: no limit.
    """
    timeout_base_ms: int
    """Maximum time in milliseconds of a turn from its first slot on, without the time for each
    token; -1: no limit.
    """
    timeout_token_ms: float
    """Additional milliseconds for each token of prompt and answer."""
    timeout_max_ms: int
    """Upper limit in milliseconds of `timeout-base-ms` plus the time of all tokens; -1: no
    limit.
    """
    grammar_lazy: bool
    """true: the grammar starts at a trigger; false: the grammar applies from the beginning, even
    with triggers.
    """
    grammar_triggers: str | Mapping[str, Any] | Sequence[Any]
    """Triggers that start a lazy grammar: texts, or pairs of `token`, `word`, `pattern` or
    `pattern-full` and a value.
    """
    seed: int
    """Seed of the random generator; -1: a random seed, returned in the metadata; others out of
    the range are taken modulo 2^32.
    """
    samplers: str | Sequence[str]
    """Samplers in order, by names or letters: penalties (e), dry (d), top-n-sigma (s), top-k
    (k), typ-p (y), top-p (p), min-p (m), xtc (x), temperature (t), infill (i), adaptive-p
    (a).
    """
    temp: float
    """temperature; 0 is greedy."""
    dynatemp_range: float
    """The temperature follows the entropy within `temp` ± this; 0: off."""
    dynatemp_exponent: float
    """Exponent of the normalised entropy in the dynamic temperature."""
    top_k: int
    """Keep the k most probable tokens; 0 and -1: all."""
    top_p: float
    """Keep the most probable tokens up to this cumulative probability."""
    min_p: float
    """Drop tokens below this share of the highest probability."""
    typ_p: float
    """Locally typical sampling; 1 is off."""
    top_n_sigma: float
    """Keep logits within this number of standard deviations of the highest; 0 and less: off."""
    min_keep: int
    """Minimum number of tokens that top-p, min-p, typ-p and xtc keep."""
    xtc_probability: float
    """Chance to drop the most probable tokens except the last of them; 0: off."""
    xtc_threshold: float
    """Minimum probability of tokens that xtc drops; above 0.5: off."""
    repeat_penalty: float
    """Penalty of tokens that occurred; 1 is off."""
    presence_penalty: float
    """Penalty of tokens that occurred at least once."""
    frequency_penalty: float
    """Penalty of tokens by their number of occurrences."""
    last_n_penalty: int
    """Number of last tokens that the penalties consider; -1: the context."""
    dry_multiplier: float
    """Penalty of tokens that continue a repetition (DRY); 0: off."""
    dry_base: float
    """Growth of that penalty for each token of the repetition; below 1: 1.75."""
    dry_allowed_length: int
    """Length of a repetition without penalty."""
    dry_penalty_last_n: int
    """Number of last tokens that DRY considers; -1: the context; 0: off."""
    dry_sequence_breakers: str | Sequence[str]
    """Texts that end a repetition; at least one, each at most 40 characters."""
    mirostat: int
    """1 or 2: version of mirostat that samples, after temperature alone; 0: off."""
    mirostat_tau: float
    """Target surprisal of mirostat, in bits."""
    mirostat_eta: float
    """Learning rate of mirostat."""
    adaptive_target: float
    """Target probability of adaptive-p, if the chain has it; below 0: off."""
    adaptive_decay: float
    """Decay of adaptive-p's running mean."""
    logit_bias: Mapping[str, float | bool] | Sequence[Any]
    """Pairs of a token or a text and a number added to its logit; false: the token is never
    sampled.
    """
    grammar: str
    """GBNF grammar of the answer, which may end where the grammar is complete."""
    json_schema: Mapping[str, Any] | bool | str
    """JSON schema of the answer, compiled to a grammar; unsupported keywords are rejected with
    their path; {}: any object; see json-schema.md.
    """
    json_whitespace: Literal["any", "compact", "spaced"]
    """White space in the JSON of a `json-schema`: spaced, `, ` and `: `; compact, none; any, at
    most 64 characters between two symbols.
    """
    schema_infer: Literal["closed", "types", "none"]
    """Keywords that are added where a JSON schema leaves them out; closed: a schema with
    `properties` is an object, one with `items` an array, and objects have only the properties
    that the schema names, unless it allows for others; types: only the types; none: as the
    standard says; see json-schema.md.
    """
    schema_lenient: bool
    """Leave out the constraints of `json-schema` that no grammar can keep, and list them in the
    metadata (`adjusted`); false: refuse the schema.
    """
    lark: str
    """Lark grammar of the answer, in llguidance's dialect; see grammars.md."""
    regex: str
    """Regular expression that the whole answer matches; see grammars.md."""
    structural_tag: Mapping[str, Any] | str
    """Free text with parts that follow a schema: `structures` of `begin`, `schema` and `end`,
    with `triggers`; see grammars.md.
    """
    jump_forward: bool
    """Tokens that the grammar forces are not sampled, and several of them are computed at once;
    false: each token is sampled.
    """
    speculation: Literal["auto", "ngram", "draft", "mtp", "off"]
    """Drafter that proposes the next tokens, so that one step can verify several; the text stays
    the same, and a step has drafts only if that is expected to be faster; ngram: repeats what
    followed the last tokens where they occurred before in the session; draft: the model's
    `draft-model`; mtp: the NextN layers of the model, which its own `speculation` = mtp in the
    configuration loads; auto: ngram; off: none; see scheduling.md.
    """
    draft_max: int
    """Maximum number of tokens of an answer that are drafted for one step; 0: none."""
    prediction: str
    """Text that the answer is expected to repeat in large part, such as a file that is edited:
    the drafter ngram proposes it, from its beginning and wherever the answer returns to it.
    """
    n_probs: int
    """Number of top tokens returned with each sampled token, with the model's logprobs; 0: none."""
    prompt_logprobs: int | None
    """Number of top tokens returned with each token of the prompt, with the model's logprobs;
    the whole prompt is computed; unset: no logprobs of the prompt.
    """
    post_sampling_probs: bool
    """Return probabilities after the samplers instead."""
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, Any]
    """Calls of `tools` in the answer: auto, none, required, or a map that names a function or
    (`allowed_tools`) those that may be called, as OpenAI defines them; a required call follows
    the function's schema, and has no arguments beside its `properties` unless the schema allows
    for them.
    """
    parallel_tool_calls: bool
    """The answer may have several calls; false: one."""
    continue_final_message: bool
    """The answer continues the last of the messages, which is the assistant's; grammars, tool
    calls and reasoning include its text.
    """
    parse_tool_calls: bool
    """Return the calls of `tools` apart from the text; false: they stay in the text, as the
    model writes them.
    """
    chat_template_kwargs: Mapping[str, Any] | str
    """Arguments of the chat template, such as enable_thinking: a map, or its JSON text; up to
    64, of 64 KiB.
    """
    reasoning_format: Literal["none", "auto", "deepseek"]
    """Deepseek (or auto): text between `<think>` and `</think>` before the answer is returned as
    reasoning; none: as text.
    """
    reasoning_budget: int
    """Maximum number of tokens of a thought; then its end is added to the answer, behind
    `reasoning-budget-message`; 0: no thought; -1: no limit.
    """
    reasoning_budget_message: str
    """Text that is added to the answer before a forced end of reasoning; at most 1024
    characters.
    """
    reasoning_effort: Literal["", "none", "minimal", "low", "medium", "high", "xhigh", "max"]
    """Level of reasoning, which limits a thought to its number in `reasoning-efforts`, unless
    `reasoning-budget` is smaller; empty: no level.
    """
    reasoning_efforts: Mapping[str, int]
    """Maximum number of tokens of a thought by level; -1: no limit; levels that a map lacks keep
    their defaults.
    """
    ignore_eos: bool
    """Continue after the end of generation."""
    lora: Mapping[str, float] | Sequence[Any] | None
    """Adapters and their scales, from the next turn on: a map of names to numbers, or a list of
    names, of pairs, or of maps with `id` and `scale`; others are off; unset: the scales of the
    configuration.
    """
    overflow: Literal["auto", "shift", "drop-turns", "truncate", "error"]
    """Treatment of a full context: `shift` drops the oldest tokens behind `n-keep`, also within
    an answer (approximate); `drop-turns` drops whole old turns behind the system message, before
    an answer; `truncate` drops the middle of the prompt behind `n-keep`; `error` refuses the
    prompt; `auto`: with `ctx-shift` as `shift`, for messages added to a session's chat as
    `drop-turns`, else as `error`.
    """
    ctx_shift: bool
    """Drop old tokens when the context is full within an answer, and continue (approximate);
    without `overflow`, true also means `overflow` = shift.
    """
    n_keep: int
    """Number of tokens at the start that are kept when tokens are dropped; -1: the whole prompt.
    A shortened prompt keeps at most half of the context.
    """
    n_discard: int
    """Number of tokens that a shift drops; 0: half of those it may drop."""
    cache_reuse: int
    """Minimum run of equal tokens that is reused by shifting (approximate); 0: off."""
    embedding: bool
    """`compute` returns an embedding of the prompt as JSON in output 0: `n_embedding` and
    `embedding`.
    """
    pooling: Literal["", "none", "mean", "cls", "last", "rank"]
    """Pooling of a text's token embeddings: none, mean, cls, last, rank (scores of a reranking
    model); empty: the model's default, else mean.
    """
    embd_normalize: int
    """Norm of an embedding: -1 none, 0 the largest number is 32760, 1 taxicab, 2 euclidean, p >
    2 p-norm; ignored with pooling none and rank.
    """


Options = TypedDict(
    "Options",
    {
        "system-prompt": str,
        "append": bool,
        "cache-prompt": bool,
        "image-tokens-max": int,
        "retention-ms": int,
        "n-predict": int,
        "stop": str | Sequence[str],
        "reverse-prompt": str | Sequence[str],
        "stop-tokens": int | Sequence[int],
        "stop-patterns": str | Sequence[str],
        "stop-complete": str | Sequence[str],
        "stop-grammar": bool,
        "stop-repetition": float,
        "stop-repetition-window": int,
        "stop-surprisal": float,
        "stop-surprisal-window": int,
        "stop-similarity": str,
        "stop-similarity-threshold": float,
        "n-indent": int,
        "t-max-prompt-ms": int,
        "t-max-predict-ms": int,
        "timeout-base-ms": int,
        "timeout-token-ms": float,
        "timeout-max-ms": int,
        "grammar-lazy": bool,
        "grammar-triggers": str | Mapping[str, Any] | Sequence[Any],
        "seed": int,
        "samplers": str | Sequence[str],
        "temp": float,
        "dynatemp-range": float,
        "dynatemp-exponent": float,
        "top-k": int,
        "top-p": float,
        "min-p": float,
        "typ-p": float,
        "top-n-sigma": float,
        "min-keep": int,
        "xtc-probability": float,
        "xtc-threshold": float,
        "repeat-penalty": float,
        "presence-penalty": float,
        "frequency-penalty": float,
        "last-n-penalty": int,
        "dry-multiplier": float,
        "dry-base": float,
        "dry-allowed-length": int,
        "dry-penalty-last-n": int,
        "dry-sequence-breakers": str | Sequence[str],
        "mirostat": int,
        "mirostat-tau": float,
        "mirostat-eta": float,
        "adaptive-target": float,
        "adaptive-decay": float,
        "logit-bias": Mapping[str, float | bool] | Sequence[Any],
        "grammar": str,
        "json-schema": Mapping[str, Any] | bool | str,
        "json-whitespace": Literal["any", "compact", "spaced"],
        "schema-infer": Literal["closed", "types", "none"],
        "schema-lenient": bool,
        "lark": str,
        "regex": str,
        "structural-tag": Mapping[str, Any] | str,
        "jump-forward": bool,
        "speculation": Literal["auto", "ngram", "draft", "mtp", "off"],
        "draft-max": int,
        "prediction": str,
        "n-probs": int,
        "prompt-logprobs": int | None,
        "post-sampling-probs": bool,
        "tools": Sequence[Mapping[str, Any]] | str,
        "tool-choice": Literal["auto", "none", "required"] | Mapping[str, Any],
        "parallel-tool-calls": bool,
        "continue-final-message": bool,
        "parse-tool-calls": bool,
        "chat-template-kwargs": Mapping[str, Any] | str,
        "reasoning-format": Literal["none", "auto", "deepseek"],
        "reasoning-budget": int,
        "reasoning-budget-message": str,
        "reasoning-effort": Literal["", "none", "minimal", "low", "medium", "high", "xhigh", "max"],
        "reasoning-efforts": Mapping[str, int],
        "ignore-eos": bool,
        "lora": Mapping[str, float] | Sequence[Any] | None,
        "overflow": Literal["auto", "shift", "drop-turns", "truncate", "error"],
        "ctx-shift": bool,
        "n-keep": int,
        "n-discard": int,
        "cache-reuse": int,
        "embedding": bool,
        "pooling": Literal["", "none", "mean", "cls", "last", "rank"],
        "embd-normalize": int,
    },
    total=False,
)
"""The parameters of turns by their names in llama.cpp, as the keyword `options`."""
