"""Keys of other runtimes that have no effect here or are refused, with the reasons.

They come from WasmEdge's metadata parser, llama-server's requests and apuslabs/wasi_nn_backend's
configuration, including its deleted versions. Answers report them as ignored; with `strict` they
are refused with the reason.
"""

from __future__ import annotations

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
        warmup check-tensors cpu-moe n-cpu-moe split-mode
        no-kv-offload ubatch-size n-ubatch
        mask-valid mask-valid-batch strict-cpu strict-cpu-batch
        poll poll-batch priority priority-batch attention-type backend-sampling""",
    "the parameters `mmap` and `mlock` of the model's configuration decide this": "load-mode",
    "the parameter `lora` applies adapters": "lora-init-without-apply",
    "not supported: images, draft models, control vectors": """
        always-regenerate-image-embd
        n-ctx-speculative n-max-speculative n-min-speculative n-gpu-layers-speculative
        p-split-speculative p-min-speculative lookup-cache-static lookup-cache-dynamic
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
        reasoning-budget-tokens reasoning-budget-message reasoning-control
        generation-prompt chat-format chat-parser continue-final-message""",
}

_REFUSALS: dict[str, str] = {
    "images are not supported": "image mmproj",
    "speech is not supported": """
        tts model-vocoder tts-output-file tts-speaker-file hf-repo-vocoder hf-file-vocoder
        model-url-vocoder""",
    "the call `embed` returns the scores of a reranking model": "reranking",
}


def _by_key(reasons: dict[str, str]) -> dict[str, str]:
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


IGNORED_KEYS = _by_key(_REASONS)
"""The reason by key, written with hyphens."""
REFUSED_KEYS = _by_key(_REFUSALS)
"""Keys that are refused because an answer that ignores them would be wrong: the reason by key,
written with hyphens.
"""
