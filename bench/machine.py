"""The conditions that all sides of the bench share: model, threads and machine facts."""

from __future__ import annotations

import platform
import time
from pathlib import Path

from tools.build_engine import PACKAGE, pinned_version
from tools.get_models import MODELS_DIR, SOURCES

MODEL = MODELS_DIR / SOURCES["smollm2"].file
THREADS = 2


def machine() -> dict[str, str]:
    """Return the facts that figures depend on: processor, cores, system, versions, date."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": models[0] if models else platform.machine(),
        "cores": str(len(models) or 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        PACKAGE: pinned_version(),
    }
