// `make docs` writes this file from docs/parameters.schema.json; do not edit it.
/** The parameters of models, contexts and turns; docs/parameters.md describes them. */
export interface ModelParameters {
  /** tokens of one session's context; 0: the model's own, at most 4096 (default: 0) */
  "ctx-size"?: number | undefined;
  /** maximum number of tokens in one step (default: 512) */
  "batch-size"?: number | undefined;
  /** maximum number of threads of a step; 0: the setting `cores` of the daemon (default: 0) */
  "threads"?: number | undefined;
  /** number of layers on GPUs; -1: as many as fit (default: -1) */
  "n-gpu-layers"?: number | undefined;
  /** the only GPU that holds layers; -1: all GPUs hold some (default: -1) */
  "main-gpu"?: number | undefined;
  /** proportion of the layers on each GPU; empty: by its free memory (default: []) */
  "tensor-split"?: string | (number)[] | undefined;
  /** the experts of all layers stay on the CPU, also of the layers on GPUs: less of a GPU's memory, and slower; only for a model with experts (MoE) (default: false) */
  "cpu-moe"?: boolean | undefined;
  /** number of first layers whose experts stay on the CPU, as with `cpu-moe`; 0: none (default: 0) */
  "n-cpu-moe"?: number | undefined;
  /** maximum number of threads of a step with several tokens, such as a prompt's; 0: as `threads` (default: 0) */
  "threads-batch"?: number | undefined;
  /** type of the keys in KV states; a quantized one takes less memory (default: "f16") */
  "cache-type-k"?: "f16" | "f32" | "bf16" | "q8_0" | "q5_1" | "q5_0" | "q4_1" | "q4_0" | "iq4_nl" | undefined;
  /** type of the values in KV states; a quantized one takes less memory and needs flash attention (default: "f16") */
  "cache-type-v"?: "f16" | "f32" | "bf16" | "q8_0" | "q5_1" | "q5_0" | "q4_1" | "q4_0" | "iq4_nl" | undefined;
  /** flash attention; auto: as llama.cpp decides if a GPU has layers; on a CPU as measured there, or on with a quantized cache-type-v (default: "auto") */
  "flash-attn"?: "auto" | "on" | "off" | undefined;
  /** layers that attend to a window keep the KV states of the whole context: more memory, and `ctx-shift` works (default: false) */
  "swa-full"?: boolean | undefined;
  /** map the file into memory; false: read it, which takes longer, and needs no page cache (default: true) */
  "mmap"?: boolean | undefined;
  /** lock the weights in memory, within the daemon's limit of locked memory (default: false) */
  "mlock"?: boolean | undefined;
  /** distribution of threads over NUMA nodes, as llama.cpp's `--numa` (default: "off") */
  "numa"?: "off" | "distribute" | "isolate" | "numactl" | undefined;
  /** scaling of positions (RoPE) for longer contexts than trained; empty: the file's (default: "") */
  "rope-scaling"?: "" | "none" | "linear" | "yarn" | "longrope" | undefined;
  /** base frequency of RoPE; 0: the file's (default: 0.0) */
  "rope-freq-base"?: number | undefined;
  /** factor of RoPE's frequencies, such as 0.5 for twice the context; 0: the file's (default: 0.0) */
  "rope-freq-scale"?: number | undefined;
  /** YaRN's mix of extrapolation; -1: by `rope-scaling` (default: -1.0) */
  "yarn-ext-factor"?: number | undefined;
  /** YaRN's factor of the attention's magnitude; -1: the default (default: -1.0) */
  "yarn-attn-factor"?: number | undefined;
  /** YaRN's low correction dimension; -1: the default (default: -1.0) */
  "yarn-beta-fast"?: number | undefined;
  /** YaRN's high correction dimension; -1: the default (default: -1.0) */
  "yarn-beta-slow"?: number | undefined;
  /** context with which a YaRN model was trained; 0: the file's (default: 0) */
  "yarn-orig-ctx"?: number | undefined;
  /** values that replace those in the file's header, each as KEY=TYPE:VALUE with the type int, float, bool or str (default: []) */
  "override-kv"?: string | (string)[] | undefined;
  /** sequences decoded in parallel (default: 4) */
  "slots"?: number | undefined;
  /** idle time in seconds after which the model is unloaded; -1: only when memory is low (default: null) */
  "keep-alive"?: number | undefined;
  /** chat template in Jinja that replaces the one in the model file (default: "") */
  "chat-template"?: string | undefined;
  /** file with the chat template, read at each load (default: "") */
  "chat-template-file"?: string | undefined;
  /** form of reasoning and tool calls in answers, which replaces the one derived from the chat template: a name (hermes, llama, â¦), or a map as `inferd show --template` prints it (default: "") */
  "tool-format"?: string | object | undefined;
  /** file of the projector with which the model reads images and sounds; auto: the one beside the model's file whose name contains `mmproj` (see media.md), if exactly one fits; none, or empty in the configuration: none (default: "auto") */
  "mmproj"?: string | undefined;
  /** second, smaller model with the same vocabulary, which drafts for turns with the `speculation` draft: the name of a model or, in the configuration, also its file; empty: none; see scheduling.md (default: "") */
  "draft-model"?: string | undefined;
  /** model whose embeddings `stop-similarity` compares while it is loaded; empty: none (default: "") */
  "similarity-model"?: string | undefined;
  /** maximum time in milliseconds that a turn waits for one comparison (default: 1000) */
  "similarity-wait-ms"?: number | undefined;
  /** system message with which a chat begins if its own messages have none; empty: none (default: "") */
  "system-prompt"?: string | undefined;
  /** set_input(0) adds to the history instead of replacing it (default: false) */
  "append"?: boolean | undefined;
  /** reuse existing KV state; false: compute the whole prompt (default: true) */
  "cache-prompt"?: boolean | undefined;
  /** maximum number of tokens of an image, to which it is scaled down before it is encoded, where the message names none; 0: the projector's own (default: 0) */
  "image-tokens-max"?: number | undefined;
  /** idle time in milliseconds after which a session's prompt is computed again; -1: no limit (default: -1) */
  "retention-ms"?: number | undefined;
  /** maximum number of tokens to generate; -1: the rest of the context (default: -1) */
  "n-predict"?: number | undefined;
  /** texts that end the turn and are removed from the output (default: []) */
  "stop"?: string | (string)[] | undefined;
  /** texts that end the turn and stay in the output (default: []) */
  "reverse-prompt"?: string | (string)[] | undefined;
  /** token ids that end the turn; their text is removed from the output (default: []) */
  "stop-tokens"?: number | (number)[] | undefined;
  /** regular expressions that end the turn at a match, which is removed from the output (default: []) */
  "stop-patterns"?: string | (string)[] | undefined;
  /** ends the turn when one of these is complete: `json`, `fence`, `sentence` (default: []) */
  "stop-complete"?: string | (string)[] | undefined;
  /** ends the turn as soon as its grammar accepts the answer (default: false) */
  "stop-grammar"?: boolean | undefined;
  /** ends the turn when this share of the last 4-grams occurred before; 0: off (default: 0.0) */
  "stop-repetition"?: number | undefined;
  /** number of last tokens that stop-repetition considers (default: 128) */
  "stop-repetition-window"?: number | undefined;
  /** ends the turn when the mean surprisal of its last tokens exceeds this number of nats; 0: off (default: 0.0) */
  "stop-surprisal"?: number | undefined;
  /** number of last tokens that stop-surprisal considers (default: 32) */
  "stop-surprisal-window"?: number | undefined;
  /** ends the turn at a sentence whose embedding is similar to that of this text, if `similarity-model` is loaded; empty: off (default: "") */
  "stop-similarity"?: string | undefined;
  /** minimum cosine similarity that ends the turn (default: 0.8) */
  "stop-similarity-threshold"?: number | undefined;
  /** ends the turn at a line, after the first, with fewer leading spaces and tabs; 0: off (default: 0) */
  "n-indent"?: number | undefined;
  /** maximum time in milliseconds to compute the prompt, from the first slot on; 0 and -1: no limit (default: -1) */
  "t-max-prompt-ms"?: number | undefined;
  /** time in milliseconds after the first token from which the turn ends at the next line; 0 and -1: no limit (default: -1) */
  "t-max-predict-ms"?: number | undefined;
  /** maximum time in milliseconds of a turn from its first slot on, without the time for each token; -1: no limit (default: -1) */
  "timeout-base-ms"?: number | undefined;
  /** additional milliseconds for each token of prompt and answer (default: 0.0) */
  "timeout-token-ms"?: number | undefined;
  /** upper limit in milliseconds of `timeout-base-ms` plus the time of all tokens; -1: no limit (default: -1) */
  "timeout-max-ms"?: number | undefined;
  /** true: the grammar starts at a trigger; false: the grammar applies from the beginning, even with triggers (default: false) */
  "grammar-lazy"?: boolean | undefined;
  /** triggers that start a lazy grammar: texts, or pairs of `token`, `word`, `pattern` or `pattern-full` and a value (default: []) */
  "grammar-triggers"?: string | unknown[] | object | undefined;
  /** seed of the random generator; -1: a random seed, returned in the metadata; others out of the range are taken modulo 2^32 (default: -1) */
  "seed"?: number | undefined;
  /** samplers in order, by names or letters: penalties (e), dry (d), top-n-sigma (s), top-k (k), typ-p (y), top-p (p), min-p (m), xtc (x), temperature (t), infill (i), adaptive-p (a) (default: ["penalties", "dry", "top-n-sigma", "top-k", "typ-p", "top-p", "min-p", "xtc", "temperature"]) */
  "samplers"?: string | ("penalties" | "dry" | "top-n-sigma" | "top-k" | "typ-p" | "top-p" | "min-p" | "xtc" | "temperature" | "infill" | "adaptive-p")[] | undefined;
  /** temperature; 0 is greedy (default: 0.8) */
  "temp"?: number | undefined;
  /** the temperature follows the entropy within `temp` ± this; 0: off (default: 0.0) */
  "dynatemp-range"?: number | undefined;
  /** exponent of the normalised entropy in the dynamic temperature (default: 1.0) */
  "dynatemp-exponent"?: number | undefined;
  /** keep the k most probable tokens; 0 and -1: all (default: 40) */
  "top-k"?: number | undefined;
  /** keep the most probable tokens up to this cumulative probability (default: 0.95) */
  "top-p"?: number | undefined;
  /** drop tokens below this share of the highest probability (default: 0.05) */
  "min-p"?: number | undefined;
  /** locally typical sampling; 1 is off (default: 1.0) */
  "typ-p"?: number | undefined;
  /** keep logits within this number of standard deviations of the highest; 0 and less: off (default: -1.0) */
  "top-n-sigma"?: number | undefined;
  /** minimum number of tokens that top-p, min-p, typ-p and xtc keep (default: 0) */
  "min-keep"?: number | undefined;
  /** chance to drop the most probable tokens except the last of them; 0: off (default: 0.0) */
  "xtc-probability"?: number | undefined;
  /** minimum probability of tokens that xtc drops; above 0.5: off (default: 0.1) */
  "xtc-threshold"?: number | undefined;
  /** penalty of tokens that occurred; 1 is off (default: 1.0) */
  "repeat-penalty"?: number | undefined;
  /** penalty of tokens that occurred at least once (default: 0.0) */
  "presence-penalty"?: number | undefined;
  /** penalty of tokens by their number of occurrences (default: 0.0) */
  "frequency-penalty"?: number | undefined;
  /** number of last tokens that the penalties consider; -1: the context (default: 64) */
  "last-n-penalty"?: number | undefined;
  /** penalty of tokens that continue a repetition (DRY); 0: off (default: 0.0) */
  "dry-multiplier"?: number | undefined;
  /** growth of that penalty for each token of the repetition; below 1: 1.75 (default: 1.75) */
  "dry-base"?: number | undefined;
  /** length of a repetition without penalty (default: 2) */
  "dry-allowed-length"?: number | undefined;
  /** number of last tokens that DRY considers; -1: the context; 0: off (default: 64) */
  "dry-penalty-last-n"?: number | undefined;
  /** texts that end a repetition; at least one, each at most 40 characters (default: ["\n", ":", "\"", "*"]) */
  "dry-sequence-breakers"?: string | (string)[] | undefined;
  /** 1 or 2: version of mirostat that samples, after temperature alone; 0: off (default: 0) */
  "mirostat"?: number | undefined;
  /** target surprisal of mirostat, in bits (default: 5.0) */
  "mirostat-tau"?: number | undefined;
  /** learning rate of mirostat (default: 0.1) */
  "mirostat-eta"?: number | undefined;
  /** target probability of adaptive-p, if the chain has it; below 0: off (default: -1.0) */
  "adaptive-target"?: number | undefined;
  /** decay of adaptive-p's running mean (default: 0.9) */
  "adaptive-decay"?: number | undefined;
  /** pairs of a token or a text and a number added to its logit; false: the token is never sampled (default: []) */
  "logit-bias"?: unknown[] | object | undefined;
  /** GBNF grammar of the answer, which may end where the grammar is complete (default: "") */
  "grammar"?: string | undefined;
  /** JSON schema of the answer, compiled to a grammar; unsupported keywords are rejected with their path; {}: any object; see json-schema.md (default: "") */
  "json-schema"?: object | boolean | string | undefined;
  /** white space in the JSON of a `json-schema`: spaced, `, ` and `: `; compact, none; any, at most 64 characters between two symbols (default: "spaced") */
  "json-whitespace"?: "any" | "compact" | "spaced" | undefined;
  /** keywords that are added where a JSON schema leaves them out; closed: a schema with `properties` is an object, one with `items` an array, and objects have only the properties that the schema names, unless it allows for others; types: only the types; none: as the standard says; see json-schema.md (default: "closed") */
  "schema-infer"?: "closed" | "types" | "none" | undefined;
  /** leave out the constraints of `json-schema` that no grammar can keep, and list them in the metadata (`adjusted`); false: refuse the schema (default: false) */
  "schema-lenient"?: boolean | undefined;
  /** Lark grammar of the answer, in llguidance's dialect; see grammars.md (default: "") */
  "lark"?: string | undefined;
  /** regular expression that the whole answer matches; see grammars.md (default: "") */
  "regex"?: string | undefined;
  /** free text with parts that follow a schema: `structures` of `begin`, `schema` and `end`, with `triggers`; see grammars.md (default: "") */
  "structural-tag"?: object | string | undefined;
  /** tokens that the grammar forces are not sampled, and several of them are computed at once; false: each token is sampled (default: true) */
  "jump-forward"?: boolean | undefined;
  /** drafter that proposes the next tokens, so that one step can verify several; the text stays the same, and a step has drafts only if that is expected to be faster; ngram: repeats what followed the last tokens where they occurred before in the session; draft: the model's `draft-model`; mtp: the NextN layers of the model, which its own `speculation` = mtp in the configuration loads; auto: ngram; off: none; see scheduling.md (default: "auto") */
  "speculation"?: "auto" | "ngram" | "draft" | "mtp" | "off" | undefined;
  /** maximum number of tokens of an answer that are drafted for one step; 0: none (default: 16) */
  "draft-max"?: number | undefined;
  /** text that the answer is expected to repeat in large part, such as a file that is edited: the drafter ngram proposes it, from its beginning and wherever the answer returns to it (default: "") */
  "prediction"?: string | undefined;
  /** number of top tokens returned with each sampled token, with the model's logprobs; 0: none (default: 0) */
  "n-probs"?: number | undefined;
  /** number of top tokens returned with each token of the prompt, with the model's logprobs; the whole prompt is computed; unset: no logprobs of the prompt (default: null) */
  "prompt-logprobs"?: number | undefined;
  /** return probabilities after the samplers instead (default: false) */
  "post-sampling-probs"?: boolean | undefined;
  /** functions for the chat template, as OpenAI defines them: a list, or its JSON text; up to 128, of 256 KiB, with names of up to 128 characters (default: []) */
  "tools"?: string | (object)[] | undefined;
  /** calls of `tools` in the answer: auto, none, required, or a map that names a function or (`allowed_tools`) those that may be called, as OpenAI defines them; a required call follows the function's schema, and has no arguments beside its `properties` unless the schema allows for them (default: "auto") */
  "tool-choice"?: string | object | undefined;
  /** the answer may have several calls; false: one (default: true) */
  "parallel-tool-calls"?: boolean | undefined;
  /** the answer continues the last of the messages, which is the assistant's; grammars, tool calls and reasoning include its text (default: false) */
  "continue-final-message"?: boolean | undefined;
  /** return the calls of `tools` apart from the text; false: they stay in the text, as the model writes them (default: true) */
  "parse-tool-calls"?: boolean | undefined;
  /** arguments of the chat template, such as enable_thinking: a map, or its JSON text; up to 64, of 64 KiB (default: {}) */
  "chat-template-kwargs"?: string | object | undefined;
  /** deepseek (or auto): text between `<think>` and `</think>` before the answer is returned as reasoning; none: as text (default: "none") */
  "reasoning-format"?: "none" | "auto" | "deepseek" | undefined;
  /** maximum number of tokens of a thought; then its end is added to the answer, behind `reasoning-budget-message`; 0: no thought; -1: no limit (default: -1) */
  "reasoning-budget"?: number | undefined;
  /** text that is added to the answer before a forced end of reasoning; at most 1024 characters (default: "") */
  "reasoning-budget-message"?: string | undefined;
  /** level of reasoning, which limits a thought to its number in `reasoning-efforts`, unless `reasoning-budget` is smaller; empty: no level (default: "") */
  "reasoning-effort"?: "" | "none" | "minimal" | "low" | "medium" | "high" | "xhigh" | "max" | undefined;
  /** maximum number of tokens of a thought by level; -1: no limit; levels that a map lacks keep their defaults (default: {"none": 0, "minimal": 512, "low": 1024, "medium": 8192, "high": 24576, "xhigh": -1, "max": -1}) */
  "reasoning-efforts"?: object | undefined;
  /** continue after the end of generation (default: false) */
  "ignore-eos"?: boolean | undefined;
  /** adapters and their scales, from the next turn on: a map of names to numbers, or a list of names, of pairs, or of maps with `id` and `scale`; others are off; unset: the scales of the configuration (default: null) */
  "lora"?: object | unknown[] | null | undefined;
  /** treatment of a full context: `shift` drops the oldest tokens behind `n-keep`, also within an answer (approximate); `drop-turns` drops whole old turns behind the system message, before an answer; `truncate` drops the middle of the prompt behind `n-keep`; `error` refuses the prompt; `auto`: with `ctx-shift` as `shift`, for messages added to a session's chat as `drop-turns`, else as `error` (default: "auto") */
  "overflow"?: "auto" | "shift" | "drop-turns" | "truncate" | "error" | undefined;
  /** drop old tokens when the context is full within an answer, and continue (approximate); without `overflow`, true also means `overflow` = shift (default: false) */
  "ctx-shift"?: boolean | undefined;
  /** number of tokens at the start that are kept when tokens are dropped; -1: the whole prompt. A shortened prompt keeps at most half of the context (default: 0) */
  "n-keep"?: number | undefined;
  /** number of tokens that a shift drops; 0: half of those it may drop (default: 0) */
  "n-discard"?: number | undefined;
  /** minimum run of equal tokens that is reused by shifting (approximate); 0: off (default: 0) */
  "cache-reuse"?: number | undefined;
  /** `compute` returns an embedding of the prompt as JSON in output 0: `n_embedding` and `embedding` (default: false) */
  "embedding"?: boolean | undefined;
  /** pooling of a text's token embeddings: none, mean, cls, last, rank (scores of a reranking model); empty: the model's default, else mean (default: "") */
  "pooling"?: "" | "none" | "mean" | "cls" | "last" | "rank" | undefined;
  /** norm of an embedding: -1 none, 0 the largest number is 32760, 1 taxicab, 2 euclidean, p > 2 p-norm; ignored with pooling none and rank (default: 2) */
  "embd-normalize"?: number | undefined;
}
