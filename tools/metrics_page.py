"""The page docs/metrics.md: every metric family with its labels and help text."""

from __future__ import annotations

from collections.abc import Iterable

from inferd.backends.errors import ERRORS_BY_NAME, Outcome
from inferd.daemon.metrics.families import PREFIX, SECTIONS
from inferd.gateways.fleet.entry import metrics as fleet
from inferd.ipc.metric_families import Family

HEAD = """\
# Metrics

`make docs` generates this page from the code. It lists the families that `GET /metrics` returns.
The setting `metrics` sets the address: a port, the path of a Unix socket, or `off`. By default it
is `127.0.0.1:4633` for the machine's service. Any other daemon has a Unix socket beside its own,
`inferd-metrics.sock`; Prometheus needs a port, such as `metrics = 4633`. An address that other
machines can reach is rejected unless `metrics-network` is `any`; in the system service
`IPAddressAllow=` must list those machines, too. `GET /health` returns 200 with `{"status": "ok"}`,
or with `degraded` and the failing components, and 503 while the daemon shuts down.

A scrape reads the daemon's own state. It loads no model, does not extend a model's residency, and
queries no worker. The counters of an engine are in memory shared with the daemon, and are at most
0.25 s old. The counters of workers that have exited stay in the sums of their model.

Any program that can connect to the loopback address can read the metrics; only the owner of a Unix
socket can read it. The listener serves one request per connection and eight connections at a time,
each within 5 s and 8 KiB.

Names are vLLM's, prefixed with `inferd_`, where vLLM has the same metric. No label holds a user, a
session or a client. The `model_name` of a model loaded from a descriptor is `descriptor`; past 256
names it is `others`. The usual `process_…` metrics describe the daemon's own process.

The entry of a fleet serves [families of its own](#the-entry-of-a-fleet); the daemons of its nodes
are scraped as any other ([fleet.md](fleet.md#metrics)). The call [`metrics`](protocol.md#metrics)
returns the same text over the protocol.

[systemd/prometheus](../systemd/prometheus) has alert rules, and
[systemd/grafana](../systemd/grafana) has a dashboard to import. A scrape job:

```yaml
scrape_configs:
  - job_name: inferd
    static_configs:
      - targets: ["127.0.0.1:4633"]
```

The picture shows the dashboard with data that Prometheus scraped for some minutes, during which
several programs used two models and a graph, held tensors and submitted jobs, too many programs
connected, a worker was killed, sessions expired and a damaged model could not be loaded. Grafana's
panel components drew it without a Grafana server (`make dashboard-picture`);
[dashboard.json](dashboard.json) has the data they drew.

![numbers at a glance; graphs of turns, tokens, tensors, jobs, models, sessions,
daemon](dashboard.png)
"""


OUTCOMES = """\
## Outcomes

Of the outcomes, only `failed` is a failure of the service: the share of failed turns is
`failed / (ok + failed)`, as in the alert `InferdTurnsFail`. Each error has one outcome:

| outcome | errors |
|---|---|
"""


def metrics_page() -> str:
    """Return the page."""
    parts = [HEAD, OUTCOMES + "".join(map(_outcome_row, Outcome))]
    parts += [_section(title, PREFIX, families) for title, families in SECTIONS.items()]
    parts.append(_section("The entry of a fleet", fleet.PREFIX, fleet.FAMILIES.values()))
    return "\n".join(parts)


def _section(title: str, prefix: str, families: Iterable[Family]) -> str:
    rows = [
        f"| `{family.exposed_name(prefix)}` | {family.kind} | {_labels(family)} | {family.doc} |"
        for family in families
    ]
    head = ["| family | kind | labels | meaning |", "|---|---|---|---|"]
    return "\n".join((f"## {title}", "", *head, *rows)) + "\n"


def _outcome_row(outcome: Outcome) -> str:
    names = sorted(n for n, cls in ERRORS_BY_NAME.items() if cls.outcome_default is outcome)
    note = ", except if the machine was too slow to render a chat: `failed`"
    return f"| `{outcome}` | {', '.join(f'`{n}`' for n in names)}{note * ('Timeout' in names)} |\n"


def _labels(family: Family) -> str:
    return ", ".join(f"`{label}`" for label in family.labels)
