"""Speed-ups and ceilings, from times made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hf_dcp.bench.compare import speedups, summary


def times(forward: tuple[float, float, float], backward: tuple[float, float, float]) -> dict[str, Any]:
    names = ("seconds", "compute_s", "exchange_s")
    return {
        which: dict(zip(names, values, strict=True)) for which, values in (("forward", forward), ("backward", backward))
    }


REPORTS = {
    "dcp": times((1.0, 0.8, 0.5), (2.0, 1.5, 1.0)),
    "zigzag-dense": times((4.0, 0.8, 3.0), (8.0, 1.6, 7.0)),
    "ring-dense": times((3.0, 1.6, 2.0), (10.0, 3.0, 9.0)),
    "zigzag": times((1.5, 0.8, 1.2), (2.5, 1.6, 1.0)),
}


def test_the_best_rival_of_each_kind() -> None:
    found = speedups(REPORTS)
    dense = found["dense"]
    assert dense["forward"] == {"best": "ring-dense", "speedup": 3.0, "ceiling": pytest.approx(2.0 / 0.8)}
    assert dense["backward"] == {"best": "zigzag-dense", "speedup": 4.0, "ceiling": pytest.approx(7.0 / 1.5)}
    assert dense["total"] == {"best": "zigzag-dense", "speedup": 4.0, "ceiling": pytest.approx(10.0 / 2.3)}
    assert found["row_exact"]["total"]["speedup"] == pytest.approx(4.0 / 3.0)


def test_what_is_missing_is_left_out() -> None:
    assert speedups({"zigzag": REPORTS["zigzag"]}) == {}
    assert list(speedups({name: REPORTS[name] for name in ("dcp", "zigzag")})) == ["row_exact"]
    plain = {
        name: {which: {"seconds": one["seconds"]} for which, one in report.items()} for name, report in REPORTS.items()
    }
    assert "ceiling" not in speedups(plain)["dense"]["total"]


def test_summary_takes_medians_by_mask() -> None:
    def result(mask: str, speedup: float) -> dict[str, Any]:
        return {"mask": mask, "speedups": {"dense": {"total": {"best": "x", "speedup": speedup, "ceiling": 2.0}}}}

    rows = summary([result("causal", s) for s in (1.0, 3.0, 1.5)] + [result("full", 4.0)])
    assert rows[0] == {
        "mask": "causal",
        "batches": 3,
        "speedup_over_dense": 1.5,
        "least_over_dense": 1.0,
        "ceiling_over_dense": 2.0,
        "share_of_ceiling_dense": 0.75,
    }
    assert rows[1]["speedup_over_dense"] == 4.0
    assert summary([{"mask": "causal", "speedups": {}}]) == [{"mask": "causal", "batches": 1}]
