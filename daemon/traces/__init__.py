"""OpenTelemetry traces: the phases of each request, exported when the request has ended.

Only `export` needs OpenTelemetry's packages, the extra `traces`; `tracing` imports it if the
setting `traces` is on.
"""
