"""Keys that other wasi-nn systems read from JSON, as their sources have them.

WasmEdge: `GGML/metadata/metadata_parser.cpp`. WAMR: `wasi_nn_llamacpp.c`. LlamaEdge:
`GgmlMetadata` of llama-core. wasi_nn_backend: `src/wasi_nn_llama.cpp`, its documentation and its
tests; deleted keys are those that its README still describes.
"""

from __future__ import annotations


def _keys(text: str) -> list[str]:
    return text.split()


WASMEDGE = _keys("""
    enable-log enable-debug-log stream-stdout embedding n-predict reverse-prompt image
    always-regenerate-image-embd mmproj main-gpu n-gpu-layers cpu-moe n-cpu-moe tensor-split
    split-mode use-mmap use-mlock load-mode warmup check-tensors model-alias model-url hf-token
    hf-repo hf-file numa ctx-size batch-size ubatch-size n-keep n-chunks n-parallel n-sequences
    n-print threads threads-batch grp-attn-n grp-attn-w rope-freq-base rope-freq-scale
    yarn-ext-factor yarn-attn-factor yarn-beta-fast yarn-beta-slow yarn-orig-ctx rope-scaling-type
    pooling-type attention-type flash-attn cache-type-k cache-type-v no-kv-offload ctx-shift
    cont-batching reranking embd-normalize embd-out embd-sep mask-valid priority strict-cpu poll
    mask-valid-batch priority-batch strict-cpu-batch poll-batch temp top-p repeat-penalty
    presence-penalty frequency-penalty top-k min-p typ-p xtc-probability xtc-threshold
    dynatemp-range dynatemp-exponent last-n-penalty dry-multipier dry-base dry-allowed-length
    dry-last-n-penalty mirostat mirostat-eta n-prev n-probs min-keep ignore-eos seed grammar
    json-schema no-perf-sampling timing-per-token n-ctx-speculative n-max-speculative
    n-min-speculative n-gpu-layers-speculative p-split-speculative p-min-speculative
    lookup-cache-static lookup-cache-dynamic tts model-vocoder tts-output-file tts-speaker-file
    hf-repo-vocoder hf-file-vocoder model-url-vocoder prompt-file path-prompt-cache
    prompt-cache-all prompt-cache-ro input-prefix input-suffix input-prefix-bos chat-template
    enable-chat-template interactive interactive-first use-color multiline-input simple-io usage
    special escape verbose-prompt display-prompt logits-file lora-init-without-apply verbosity
    port hostname public-path timeout-read timeout-write n-threads-http n-cache-reuse
    slot-save-path slot-prompt-similarity endpoint-slots endpoint-props endpoint-metrics
    ssl-file-key ssl-file-cert webui log-json hellaswag hellaswag-tasks winogrande
    winogrande-tasks multiple-choice multiple-choice-tasks kl-divergence ppl-stride
    ppl-output-type control-vector-layer-start control-vector-layer-end is-pp-shared n-pp n-tg
    n-pl context-files chunk-size chunk-separator n-junk i-pos out-file n-out-freq n-save-freq
    i-chunk process-output compute-ppl n-pca-batch n-pca-iterations cvector-dimre-method
    cvector-positive-file cvector-negative-file spm-infill no-perf batched-bench-output-jsonl
""")
WAMR = _keys("""
    enable-log enable-debug-log stream-stdout embedding n-predict n-gpu-layers ctx-size
""")
LLAMAEDGE = _keys("""
    enable-log enable-debug-log embedding n-predict reverse-prompt mmproj image n-gpu-layers
    main-gpu tensor-split use-mmap split-mode ctx-size batch-size ubatch-size threads temp top-p
    repeat-penalty presence-penalty frequency-penalty grammar json_schema include_usage
""")

_MEMORY = """
    context_shifting cache_strategy max_cache_tokens max_memory_mb memory_pressure_threshold
    n_keep_tokens enable_partial_cache_deletion enable_token_cache_reuse cache_deletion_strategy
"""
_TURN = """
    temperature temp top_p top_k min_p typical_p repeat_penalty frequency_penalty presence_penalty
    penalty_last_n repeat_last_n seed ignore_eos dry_multiplier dry_base dry_allowed_length
    dry_penalty_last_n dynatemp_range dynatemp_exponent mirostat mirostat_tau mirostat_eta n_probs
    logprobs min_keep grammar
"""
_MODEL = "n_predict max_tokens n_gpu_layers ctx_size n_ctx batch_size n_batch threads"
_BACKEND = """
    max_sessions idle_timeout_ms auto_cleanup queue_size default_task_timeout_ms
    priority_scheduling_enabled fair_scheduling_enabled auto_queue_cleanup queue_warning_threshold
    queue_reject_threshold max_concurrent auto_cleanup_enabled
"""
TOP, TURN = "top", "turn"
"""The place of keys outside any object, and that of the keys of `run_inference`."""
WASI_NN_BACKEND: dict[str, list[str]] = {
    place: _keys(keys)
    for place, keys in {
        TOP: f"{_MODEL} {_BACKEND} temp temperature top_p repeat_penalty logit_bias",
        "model": f"{_MODEL} use_mmap use_mlock numa",
        "sampling": f"{_TURN} dry_sequence_breakers grammar_lazy",
        "sampling.dynatemp": "range exponent",
        "stopping": """
            max_tokens ignore_eos stop grammar_triggers token_conditions pattern_conditions
            semantic_conditions dynamic_timeout context_aware stop_sequences max_time_ms
            timeout_config semantic_stopping token_filters
        """,
        "backend": f"{_BACKEND} auto_cleanup_sessions",
        "memory_policy": _MEMORY,
        "memory": f"{_MEMORY} n_discard_tokens",
        "memory_management.cache_policy": "enable_prompt_cache retention_ms",
        "logging": "level enable_debug timestamps colors file",
        "performance": "batch_processing batch_size batch_timeout_ms",
        TURN: f"{_TURN} max_tokens n_predict stop",
    }.items()
}
"""The keys by the object that has them."""
_PREFIXES = {"sampling.dynatemp": "dynatemp-"}

SYSTEMS = {
    "W": WASMEDGE,
    "A": WAMR,
    "L": LLAMAEDGE,
    "B": [key for keys in WASI_NN_BACKEND.values() for key in keys],
}


def spelling_of(key: str, place: str = TOP) -> str:
    """Return the name of the row for a *key*, which has hyphens and the prefix of its object."""
    return _PREFIXES.get(place, "") + key.replace("_", "-")


def places_of(name: str) -> list[tuple[str, str, str]]:
    """Return the systems that have the row *name*, each with the key's place and its spelling."""
    flat = [
        (system, TOP, key)
        for system, keys in SYSTEMS.items()
        if system != "B"
        for key in keys
        if spelling_of(key) == name
    ]
    nested = [
        ("B", place, key)
        for place, keys in WASI_NN_BACKEND.items()
        for key in keys
        if spelling_of(key, place) == name
    ]
    return flat + nested


def all_names() -> set[str]:
    """Return the names of the rows that the systems need."""
    flat = {spelling_of(key) for keys in (WASMEDGE, WAMR, LLAMAEDGE) for key in keys}
    return flat | {spelling_of(k, place) for place, keys in WASI_NN_BACKEND.items() for k in keys}
