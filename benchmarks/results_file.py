"""Where benchmarks leave their figures: JSON with the command, the machine and the load that it had."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.servers import machine

RESULTS = Path(__file__).parent / "results"


def write(name: str, module: str, content: dict[str, Any], path: Path | None = None) -> Path:
    """Keep `content` under `results/`, or elsewhere where `path` says so."""
    path = path or RESULTS / f"{name}.json"
    document = {
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
