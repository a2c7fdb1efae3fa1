"""Speed-ups and their ceilings, from what was measured of the contestants of one batch, and over batches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from hf_dcp.bench.contestants import DENSE, ROW_EXACT
from hf_dcp.planning.plan import PASSES

Reports = dict[str, dict[str, Any]]
"""Contestant -> what `hf_dcp.bench.measure.collect` says of it."""
SPANS = (*PASSES, "total")
RIVALS = {"dense": DENSE, "row_exact": ROW_EXACT}


def speedups(reports: Reports) -> dict[str, Any]:
    """How much faster dcp was than the best of the dense and of the row-exact static schemes.

    Returns:
        for "dense" and "row_exact", where one of them was measured, and for forward, backward and both together:
        "best" (the fastest rival), "speedup", and "ceiling" where compute and exchange were measured alone: the rivals'
        least max(compute, exchange) over that of dcp, which is what would remain if every exchange hid perfectly.
    """
    if "dcp" not in reports:
        return {}
    result: dict[str, Any] = {}
    for kind, names in RIVALS.items():
        rivals = {name: reports[name] for name in names if name in reports}
        if rivals:
            result[kind] = {span: _compared(reports["dcp"], rivals, span) for span in SPANS}
    return result


def _compared(own: dict[str, Any], rivals: Reports, span: str) -> dict[str, Any]:
    best = min(rivals, key=lambda name: _over(span, rivals[name], _seconds))
    entry = {"best": best, "speedup": _over(span, rivals[best], _seconds) / _over(span, own, _seconds)}
    apart = [report for report in rivals.values() if "exchange_s" in report["forward"]]
    if apart and "exchange_s" in own["forward"]:
        hidden = min(_over(span, report, _perfectly_hidden) for report in apart)
        entry["ceiling"] = hidden / _over(span, own, _perfectly_hidden)
    return entry


def _over(span: str, report: dict[str, Any], value: Callable[[dict[str, Any]], float]) -> float:
    return sum(value(report[which]) for which in (PASSES if span == "total" else (span,)))


def _seconds(one: dict[str, Any]) -> float:
    return one["seconds"]


def _perfectly_hidden(one: dict[str, Any]) -> float:
    return max(one["compute_s"], one["exchange_s"])


def summary(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over batches, by mask.

    Args:
        results: entries with "mask" and "speedups".
    """
    rows = []
    for mask in dict.fromkeys(result["mask"] for result in results):
        own = [result["speedups"] for result in results if result["mask"] == mask]
        row: dict[str, Any] = {"mask": mask, "batches": len(own)}
        for kind in RIVALS:
            entries = [one[kind]["total"] for one in own if kind in one]
            if not entries:
                continue
            row[f"speedup_over_{kind}"] = statistics.median(entry["speedup"] for entry in entries)
            row[f"least_over_{kind}"] = min(entry["speedup"] for entry in entries)
            if all("ceiling" in entry for entry in entries):
                row[f"ceiling_over_{kind}"] = statistics.median(entry["ceiling"] for entry in entries)
                row[f"share_of_ceiling_{kind}"] = statistics.median(e["speedup"] / e["ceiling"] for e in entries)
        rows.append(row)
    return rows
