"""The line at the start of training."""

from __future__ import annotations

from hf_dcp.lookahead.report import PlanReport
from hf_dcp.lookahead.session import Session


def start_line(session: Session, report: PlanReport | None) -> str:
    """One line that says what is on."""
    group = session.require_group()
    nodes = group.topology.num_nodes
    text = f"hf_dcp: {group.dp_size} group(s) of {group.size} rank(s) on {nodes} node(s)"
    if report is not None:
        text += f"; first batch: {report.tokens} tokens, at most {report.max_rank_tokens} per rank"
        if report.ring_bytes:
            sent = report.inter_bytes + report.intra_bytes
            text += (
                f", {sent / 1e6:.4g} MB sent per step, {1 - sent / report.ring_bytes:.0%} less than a dense static ring"
            )
    if session.depth is not None:
        text += f"; {session.depth.describe()}"
    return text
