"""OpenTelemetry traces: what each request went through, told once it is over.

Nothing but `export` needs OpenTelemetry's packages, the extra `traces`; `service` imports it where
the setting `traces` asks for spans.
"""

__all__ = ()
