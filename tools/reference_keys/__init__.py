"""Keys of other wasi-nn systems, and their effects in inferd."""

from .row import Row
from .systems import SYSTEMS, TOP, TURN, WASI_NN_BACKEND, all_names, places_of
from .table import ROWS, TOPICS

__all__ = (
    "ROWS",
    "SYSTEMS",
    "TOP",
    "TOPICS",
    "TURN",
    "WASI_NN_BACKEND",
    "Row",
    "all_names",
    "places_of",
)
