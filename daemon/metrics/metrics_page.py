"""docs/metrics.md: every family with its labels and its meaning, made from the table."""

from __future__ import annotations

from .families import PREFIX, SECTIONS, Family

HEAD = """\
# Metrics

What `GET /metrics` tells, made from the code by `make docs`. The setting `metrics` says where:
`127.0.0.1:4633` by itself, another port, a Unix socket's path, or `off`; an address that other
machines reach is refused unless `metrics-network` is `any` (in the system service `IPAddressAllow=`
has to name them, too). `GET /health` answers 200 with `{"status": "ok"}`, or `degraded` and which
parts fail, and 503 while the daemon ends.

A scrape reads what the daemon knows. It loads no model, keeps none from leaving, asks no worker
and waits for none: the figures of an engine lie in memory that it shares with the daemon, and are
at most 0.25 s old. Those of workers that are gone stay in the sums of their model.

Whoever may connect to the loopback may read them; a Unix socket is its owner's alone. One request a
connection, eight at a time, each within 5 s and 8 KiB.

Names are vLLM's behind `inferd_`, where it has the same. No label holds a user, a session or a
client. Models that came by a descriptor are `descriptor` in `model_name`, and past 256 names the
rest is `others`. Beside these there are the usual `process_…` of the daemon's own process.

[systemd/prometheus](../systemd/prometheus) has rules for alerts,
[systemd/grafana](../systemd/grafana) a dashboard to import. A scrape job:

```yaml
scrape_configs:
  - job_name: inferd
    static_configs:
      - targets: ["127.0.0.1:4633"]
```

The dashboard, of a Prometheus that scraped a daemon for some minutes: several programs on two
models, a crowd that was too large, and a worker that was killed. Grafana's own panel components
drew it, without a Grafana server (`make dashboard-picture`); [dashboard.json](dashboard.json) tells
what they drew.

![numbers at a glance; graphs of turns, tokens, models, sessions, the daemon](dashboard.png)
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for title, families in SECTIONS.items():
        rows = [
            f"| `{shown(family)}` | {family.kind} | {_labels(family)} | {family.doc} |"
            for family in families
        ]
        head = ["| family | kind | labels | meaning |", "|---|---|---|---|"]
        parts.append("\n".join((f"## {title}", "", *head, *rows)) + "\n")
    return "\n".join(parts)


def shown(family: Family) -> str:
    """Return a family's name as it is told."""
    return PREFIX + family.name + ("_total" if family.kind == "counter" else "")


def _labels(family: Family) -> str:
    return ", ".join(f"`{label}`" for label in family.labels)
