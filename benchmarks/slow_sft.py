"""recipes/sft.py with a planner that takes so many seconds per plan: python benchmarks/slow_sft.py SECONDS [RECIPE ARGUMENTS]

The planner sleeps, as one on cores of its own would leave those of training alone.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from hf_dcp.lookahead import planning
from hf_dcp.planning.planner import plan_batch

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import sft


def slowed(seconds: float) -> Any:
    def plan(*args: Any) -> Any:
        since = time.perf_counter()
        made = plan_batch(*args)
        time.sleep(max(0.0, seconds + since - time.perf_counter()))
        return made

    return plan


if __name__ == "__main__":
    planning.plan_batch = slowed(float(sys.argv.pop(1)))
    sft.main()
