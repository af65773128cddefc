"""OpenTelemetry traces: the phases of each request, exported once it is over.

Nothing but `export` needs OpenTelemetry's packages, the extra `traces`; `service` imports it where
the setting `traces` asks for spans.
"""

__all__ = ()
