"""The part of the configuration by which a model's encoder process works."""

from __future__ import annotations

import msgspec

from ...backends import ModelSpec
from ..config.settings import Config


def has_encoder(spec: ModelSpec) -> bool:
    """Return whether a model reads images or sounds, which a process of their own encodes."""
    return bool(spec.mmproj) or (spec.backend == "echo" and bool(spec.options.get("media")))


class MediaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds on contents and on embeddings; they hold from a model's load on."""

    bytes_max: int
    """Of one content."""
    pixels_max: int
    """Of an image, before it is decoded."""
    seconds_max: int
    """Of a sound."""
    cache_bytes: int
    """Of all embeddings that are kept."""
    cores: int
    """The most threads that encode."""

    @classmethod
    def of_config(cls, config: Config) -> MediaSettings:
        """Return the settings that a load takes from *config*."""
        return cls(
            bytes_max=config.media_bytes_max,
            pixels_max=config.media_pixels_max,
            seconds_max=config.audio_seconds_max,
            cache_bytes=config.media_cache_bytes,
            cores=config.cores,
        )
