"""Parameters that a client or a configuration can set: their table, reading them, their meaning."""

from .ignored_keys import OUTSIDE
from .reading import Options, nearest, parse_json_options, read_options
from .sampler_options import SamplingParams, sampling_params, settle
from .stop_options import StoppingParams, stopping_params
from .table import BY_NAME, BY_SPELLING, PARAMETERS, SAMPLERS, Kind, Level, Parameter

__all__ = (
    "BY_NAME",
    "BY_SPELLING",
    "OUTSIDE",
    "PARAMETERS",
    "SAMPLERS",
    "Kind",
    "Level",
    "Options",
    "Parameter",
    "SamplingParams",
    "StoppingParams",
    "nearest",
    "parse_json_options",
    "read_options",
    "sampling_params",
    "settle",
    "stopping_params",
)
