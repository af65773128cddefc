"""The parameters of clients and configurations: their table, reading them, adjusting them."""

from .adjustment import overflow_beside
from .chat_options import ToolChoice, tool_choice_of
from .fitting import Fitting, as_whole, fit_settings, with_whole_numbers, without_nulls
from .other_runtimes.ignored_keys import IGNORED_KEYS, REFUSED_KEYS
from .other_runtimes.lenient_values import SEEDS
from .other_runtimes.spellings import FORMS
from .parameter_table import (
    BY_NAME,
    BY_SPELLING,
    FORMATS,
    NOT_KEPT_TOKENS,
    PARAMETERS,
    REQUESTABLE,
    SAMPLERS,
    Kind,
    Level,
    OverflowPolicy,
    Parameter,
    differing_values,
)
from .reading import (
    KEYS_MAX,
    SECTION_NAMES,
    Options,
    check_turn_level,
    flat_keys,
    nearest,
    parse_json_options,
    parse_turn_json,
    read_options,
)
from .sampler_options import (
    GRAMMAR_FIELDS,
    SamplingParams,
    adjust_parameters,
    leave_out_unknown_biases,
    sampling_params,
)
from .stop_options import StoppingParams, stopping_params
from .structural_tags import StructuralTag, StructuralTags, structural_tag_text

__all__ = (
    "BY_NAME",
    "BY_SPELLING",
    "FORMATS",
    "Fitting",
    "FORMS",
    "GRAMMAR_FIELDS",
    "IGNORED_KEYS",
    "REFUSED_KEYS",
    "KEYS_MAX",
    "NOT_KEPT_TOKENS",
    "PARAMETERS",
    "REQUESTABLE",
    "SAMPLERS",
    "SECTION_NAMES",
    "SEEDS",
    "Kind",
    "Level",
    "Options",
    "OverflowPolicy",
    "Parameter",
    "SamplingParams",
    "StoppingParams",
    "StructuralTag",
    "StructuralTags",
    "ToolChoice",
    "as_whole",
    "check_turn_level",
    "differing_values",
    "flat_keys",
    "leave_out_unknown_biases",
    "nearest",
    "overflow_beside",
    "parse_json_options",
    "parse_turn_json",
    "read_options",
    "sampling_params",
    "adjust_parameters",
    "stopping_params",
    "structural_tag_text",
    "tool_choice_of",
    "fit_settings",
    "with_whole_numbers",
    "without_nulls",
)
