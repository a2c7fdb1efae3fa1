"""From lengths to an estimate: fill batches, put them through all schemes, sum up."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hf_dcp.config import DcpConfig
from hf_dcp.estimate.hardware import Hardware
from hf_dcp.estimate.lengths import Lengths, Progress
from hf_dcp.estimate.model import Model
from hf_dcp.estimate.schemes import DCP, Outcome, Setting, evaluate_all
from hf_dcp.estimate.summary import Bin, SchemeSummary, best_static, histogram, notes, summarise, verdict
from hf_dcp.planning.batch import Topology


@dataclass(frozen=True)
class Question:
    """What is asked.

    Args:
        batches: at most so many are planned, drawn by ``seed``.
        seconds: no further batches are planned after so many seconds; at least one is.
        processes: that plan.
    """

    mask: str
    model: Model
    topology: Topology
    hardware: Hardware
    config: DcpConfig
    tokens_per_batch: int = 131_072
    batches: int = 200
    seconds: float = 40.0
    processes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens_per_batch", "batches", "processes"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} must be an integer of at least 1, not {getattr(self, name)}")
        if self.seconds <= 0:
            raise ValueError(f"--seconds must be above 0, such as 40, not {self.seconds}")


@dataclass(frozen=True)
class Estimate:
    """The answer."""

    question: Question
    lengths: Lengths
    batches: list[list[int]]
    """The lengths of the batches that were planned."""
    outcomes: list[dict[str, Outcome]]
    batches_in_all: int

    @property
    def schemes(self) -> dict[str, SchemeSummary]:
        return summarise(self.outcomes)

    @property
    def verdict(self) -> str:
        return verdict(self.schemes, self.lengths.tokens, self.question.topology.world_size)

    @property
    def notes(self) -> list[str]:
        return notes(self.lengths.tokens, self.question.tokens_per_batch, self.question.topology.world_size)

    @property
    def bins(self) -> list[Bin]:
        return histogram(self.lengths.tokens)

    @property
    def plan_s(self) -> float:
        """CPU seconds that a batch's plan takes, on average."""
        return float(np.mean([one[DCP].plan_s for one in self.outcomes]))

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        asked, tokens = self.question, self.lengths.tokens
        return {
            "rows": len(tokens),
            "lengths_from": self.lengths.source,
            "length_percentiles": {str(p): int(np.percentile(tokens, p)) for p in (0, 10, 50, 90, 99, 100)},
            "histogram": [asdict(one) for one in self.bins],
            "mask": asked.mask,
            "model": asked.model.source,
            "nodes": asked.topology.num_nodes,
            "devices": asked.topology.world_size,
            "tokens_per_batch": asked.tokens_per_batch,
            "batches": len(self.outcomes),
            "batches_in_all": self.batches_in_all,
            "hardware": {"name": asked.hardware.name, "source": asked.hardware.source, **asdict(asked.hardware.rates)},
            "schemes": {name: asdict(one) for name, one in self.schemes.items()},
            "best_static": best_static(self.schemes),
            "plan_cpu_s": self.plan_s,
            "verdict": self.verdict,
            "notes": self.notes,
        }


def estimate(lengths: Lengths, question: Question, progress: Progress | None = None) -> Estimate:
    """Raises ValueError for a mask that doesn't fit a length."""
    lengths = lengths.cut(question.tokens_per_batch)
    batches, in_all = fill(lengths.tokens, question)
    setting = Setting(
        question.topology,
        question.model.shape,
        question.config,
        question.hardware.rates,
        question.model.flops_per_token,
    )
    until = time.monotonic() + question.seconds
    processes = min(question.processes, len(batches))
    outcomes: list[dict[str, Outcome]] = []
    with closing(evaluate_all(batches, question.mask, setting, processes)) as results:
        for outcome in results:
            outcomes.append(outcome)
            if progress:
                progress("planning batches", len(outcomes), len(batches))
            if time.monotonic() > until:
                break
    return Estimate(question, lengths, batches, outcomes, in_all)


def fill(tokens: np.ndarray, question: Question) -> tuple[list[list[int]], int]:
    """The batches of an epoch, as training fills them: the first so many, and how many there are."""
    from hf_dcp.data.sampler import TokenBatches

    filled = TokenBatches(tokens, question.tokens_per_batch, seed=question.seed)
    chosen = filled.order()[: question.batches]
    return [tokens[filled.batches[number]].tolist() for number in chosen], len(filled)
