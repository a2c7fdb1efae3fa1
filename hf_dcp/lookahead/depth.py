"""How far plans run ahead: the look-ahead κ, and the DataLoader workers and prefetched batches that make it."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_WORKERS = 2
DEFAULT_PREFETCH = 2
"""That of torch's DataLoader."""


@dataclass(frozen=True)
class Depth:
    """Plans for iterations i … i + ``lookahead`` are made, or under way, when i runs.

    Args:
        workers: DataLoader workers of each rank.
        prefetch: batches that each worker has ready; 0 without workers.
        asked: the look-ahead that was asked for, None if none was.
    """

    workers: int
    prefetch: int
    asked: int | None = None

    @property
    def lookahead(self) -> int:
        return self.workers * self.prefetch

    @property
    def keep(self) -> int:
        """Iterations for which a plan stays in the store: until no rank can still want it."""
        return 2 * self.lookahead + 2

    def loader_options(self) -> dict[str, int]:
        """What a DataLoader is to be given."""
        if not self.workers:
            return {"num_workers": 0}
        return {"num_workers": self.workers, "prefetch_factor": self.prefetch}

    def describe(self) -> str:
        """Half a sentence for the line at the start."""
        if not self.workers:
            return "look-ahead 0: without DataLoader workers every batch waits for its plan (lookahead=4 hides that)"
        rounded = f", {self.asked} asked for" if self.asked not in (None, self.lookahead) else ""
        return f"look-ahead {self.lookahead} ({self.workers} workers x {self.prefetch} batches{rounded})"


def derive_depth(lookahead: int | None, workers: int | None, prefetch: int | None) -> Depth:
    """The depth that settings mean; a look-ahead that its workers don't divide is rounded up.

    Args:
        lookahead: κ; None: whatever ``workers`` and ``prefetch`` make.
        workers, prefetch: DataLoader workers and batches of each; None where they are not given.

    Raises:
        ValueError: if settings contradict each other, or are out of range.
    """
    for name, value, least in (
        ("lookahead", lookahead, 0),
        ("num_workers", workers, 0),
        ("prefetch_factor", prefetch, 1),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    if lookahead is None:
        if not workers:
            if prefetch is not None:
                raise ValueError(
                    f"prefetch_factor={prefetch} needs num_workers of at least 1, or lookahead in its place"
                )
            return Depth(0, 0)
        return Depth(workers, prefetch or DEFAULT_PREFETCH)
    if lookahead == 0:
        if workers:
            raise ValueError(f"lookahead=0 contradicts num_workers={workers}, which plan ahead: leave one of them out")
        return Depth(0, 0, 0)
    if workers == 0:
        raise ValueError(f"lookahead={lookahead} contradicts num_workers=0: leave num_workers out, or set lookahead=0")
    if workers is None:
        workers = min(DEFAULT_WORKERS, lookahead) if prefetch is None else -(-lookahead // prefetch)
    needed = -(-lookahead // workers)
    if prefetch not in (None, needed):
        raise ValueError(
            f"lookahead={lookahead} contradicts num_workers={workers} with prefetch_factor={prefetch}, which make "
            f"{workers * (prefetch or 0)}: leave prefetch_factor out (it would be {needed}), or leave lookahead out"
        )
    return Depth(workers, needed, lookahead)
