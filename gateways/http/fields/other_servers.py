"""Fields of other servers' requests: of llama-server, vLLM and SGLang, LM Studio and OpenAI's
older APIs. They are known on each path that generates text for OpenAI's or Anthropic's clients.

A field that would change the answer is refused, except with the value that means its absence.
"""

from __future__ import annotations

from ....backends.params import PARAMETERS, REFUSED_KEYS
from .table import Field, ignored, refused

_NAME = "use the field of this API"
_TEMPLATE = "the model has its own; its operator can replace it"
_BUDGET = "reasoning has no budget of its own"
_BEAMS = "beam search is not supported"
_FORM = "replies have the form of this API"
_OPERATOR = "the operator sets it for the model, in the daemon's configuration"
_PLACEMENT = frozenset(
    {
        *("batch-size", "threads", "threads-batch", "n-gpu-layers", "main-gpu", "tensor-split"),
        *("flash-attn", "mmap", "mlock", "numa", "slots", "keep-alive", "swa-full"),
        *("similarity-model", "similarity-wait-ms", "ctx-size"),
    }
)
"""Parameters of a model that do not change its answers, or that a turn may set."""

OTHER_SERVERS: tuple[Field, ...] = (
    ignored("ttl", "the daemon's `keep-alive` decides"),
    ignored("keep_alive", "the daemon's `keep-alive` decides"),
    ignored("id_slot", "the daemon chooses slots itself", -1),
    refused("extra_body", "the clients of OpenAI send its fields at the top level", {}),
    refused("add_generation_prompt", "prompts always end where an answer begins", True),
    refused("continue_final_message", "prompts always end where an answer begins", False),
    refused("generation_prompt", _TEMPLATE, ""),
    refused("chat_template", _TEMPLATE, ""),
    refused("documents", "send them in the messages", []),
    refused("chat_format", "the model's template decides", ""),
    refused("chat_parser", "the model's template decides", ""),
    refused("reasoning_in_content", "reasoning is a field of its own", False),
    refused("include_reasoning", "reasoning is a field of its own", True),
    refused("separate_reasoning", "reasoning is a field of its own", True),
    refused("reasoning_control", "an answer cannot be changed while it is generated", False),
    refused("reasoning_budget_tokens", _BUDGET, -1),
    refused("reasoning_budget_message", _BUDGET, ""),
    refused("thinking_budget_tokens", _BUDGET, -1),
    refused("thinking_budget", _BUDGET),
    refused("thinking_token_budget", _BUDGET, -1),
    refused("echo", "only `/v1/completions` has it", False),
    refused("best_of", "use n, and choose", 1),
    refused("n_cmpl", "use n", 1),
    refused("functions", "is OpenAI's old form of tools: use tools", []),
    refused("function_call", "is OpenAI's old form of tool_choice", "none", "auto"),
    refused("verbosity", "no model here has it", "medium"),
    refused("min_tokens", "an answer may end at once", 0),
    refused("min_new_tokens", "an answer may end at once", 0),
    refused("max_new_tokens", _NAME),
    refused("max_output_tokens", _NAME),
    refused("num_predict", _NAME),
    refused("n", "a request has one answer", 1),
    refused("reasoning", _NAME, {}),
    refused("reasoning_effort", _NAME),
    refused("thinking", _NAME),
    refused("text", _NAME, {}),
    refused("output_config", _NAME, {}),
    refused("output_format", _NAME),
    refused("suffix", "the models do not fill in text between two others", ""),
    refused("raw", _NAME, False),
    refused("context", "send the messages, or session_id", []),
    refused("template", _TEMPLATE, ""),
    refused("previous_response_id", "send the messages, or session_id"),
    refused("conversation", "send the messages, or session_id"),
    refused("mcp_servers", "the gateway calls no servers", []),
    refused("web_search_options", "the gateway does not search the web"),
    refused("modalities", "the models have only text", ["text"]),
    refused("audio", "the models have no audio"),
    refused("images", "the models read only text", []),
    refused("prompt", _NAME, "", []),
    refused("input", _NAME, "", []),
    refused("messages", _NAME, []),
    refused("instructions", _NAME, ""),
    refused("system", _NAME, ""),
    refused("options", "send its fields at the top level", {}),
    refused("format", _NAME, ""),
    refused("use_beam_search", _BEAMS, False),
    refused("num_beams", _BEAMS, 1),
    refused("length_penalty", _BEAMS, 1),
    refused("early_stopping", _BEAMS, False),
    refused("do_sample", "use temperature 0 for greedy answers", True),
    refused("allowed_token_ids", "use grammar or logit_bias", []),
    refused("bad_words", "use logit_bias", []),
    refused("logits_processors", "use logit_bias", []),
    refused("ebnf", "use grammar, which is GBNF", ""),
    refused("include_stop_str_in_output", "use reverse_prompt", False),
    refused("no_stop_trim", "use reverse_prompt", False),
    refused("skip_special_tokens", "special tokens are not part of the text", True),
    refused("add_special_tokens", "the daemon adds them as the model needs", False),
    refused("truncate_prompt_tokens", "a prompt that is too long is refused"),
    refused("prompt_embeds", "a prompt is text"),
    refused("input_embeds", "a prompt is text"),
    refused("input_prefix", "the models do not fill in text between two others", ""),
    refused("input_suffix", "the models do not fill in text between two others", ""),
    refused("input_extra", "the models do not fill in text between two others", []),
    refused("prompt_logprobs", "only `/v1/completions` and `/v1/chat/completions` have them"),
    refused("return_tokens", _FORM, False),
    refused("return_token_ids", _FORM, False),
    refused("return_tokens_as_token_ids", _FORM, False),
    refused("response_fields", _FORM, []),
    refused("verbose", _FORM, False),
    refused("timings_per_token", _FORM, False),
    refused("return_progress", _FORM, False),
    refused("lora_path", "the parameter `lora` names adapters", ""),
    *(refused(name.replace("-", "_"), reason, False, "") for name, reason in REFUSED_KEYS.items()),
    *(
        refused(each.name.replace("-", "_"), _OPERATOR)
        for each in PARAMETERS
        if each.level == "model" and each.name not in {*_PLACEMENT, "chat-template"}
    ),
)
"""The path's own table replaces these where it has a field of the same name."""
