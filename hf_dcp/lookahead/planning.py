"""From a batch to this rank's plan: each batch is planned once in the group, by the rank that its key names."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from torch.utils.data import get_worker_info

from hf_dcp.lookahead.batch_plan import BatchPlan, Origin
from hf_dcp.lookahead.link import StoreLink
from hf_dcp.lookahead.patience import Patience
from hf_dcp.lookahead.payload import Payload, PayloadError, PlanningFailed, decode, encode_error, encode_plan
from hf_dcp.lookahead.report import PlanReport
from hf_dcp.lookahead.settings import PlanSettings, plan_key
from hf_dcp.lookahead.shelf import Shelf, name_of
from hf_dcp.lookahead.store import StoreError, StoreTimeout
from hf_dcp.planning.batch import BatchSpec
from hf_dcp.planning.planner import plan_batch

logger = logging.getLogger("hf_dcp")


class PlanSource:
    """Gives this rank's plan for a batch. It pickles, and works on in forked processes, with a connection of their own.

    Args:
        settings: equal on all ranks of the group but for ``rank`` and ``communicator``.
    """

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
        """Plans of this process by origin; "refused" payloads; "published" plans."""
        self._cache: OrderedDict[bytes, _Cached] = OrderedDict()
        self._start()

    def _start(self) -> None:
        """What belongs to this process alone: a connection, and what is in the store by its doing."""
        self._process = os.getpid()
        self._link = StoreLink(self.settings.address)
        self._patience = Patience(self.settings.timeout)
        self._bytes = 0
        self._trouble = ""
        others = [rank for rank in range(self.world_size) if rank != self.settings.rank]
        self._shelf = Shelf(self._link, others, self.settings.keep)
        if get_worker_info() is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _leave)

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        PlanSource.__init__(self, state["settings"])

    @property
    def world_size(self) -> int:
        return self.settings.topology.world_size

    def get(self, batch: BatchSpec) -> BatchPlan:
        """This rank's plan. Raises ValueError for a batch that can't be planned, the same on every rank."""
        since = time.perf_counter()
        if self._process != os.getpid():
            self.counts.clear()
            self._start()
        self._shelf.next_batch()
        self._bytes, self._trouble = 0, ""
        key = plan_key(batch, self.settings)
        payload, origin = self._find(key, batch)
        self.counts[origin] += 1
        self._tidy()
        settings, now = self.settings, time.perf_counter()
        return BatchPlan(
            payload.rank_plan,
            payload.report,
            origin,
            now - since,
            settings.communicator,
            settings.config.backward_kv,
            store_bytes=self._bytes,
            trouble=self._trouble,
            kernel=settings.config.kernel,
            lengths=tuple(int(length) for length in batch.lengths),
            ready_at=now,
        )

    def planner_of(self, key: bytes) -> int:
        """The rank that plans the batch with this key."""
        return int.from_bytes(key[:8], "little") % self.world_size

    def close(self) -> None:
        """Take this process's plans out of the store."""
        self._shelf.clear()

    def _find(self, key: bytes, batch: BatchSpec) -> tuple[Payload, Origin]:
        mine = self.planner_of(key) == self.settings.rank
        if key in self._cache:
            self._cache.move_to_end(key)
            cached = self._cache[key]
            if mine and key not in self._shelf:  # others may have forgotten it
                self._publish(key, cached.others)
            return cached.own, "cached"
        if mine:
            own, others = self._plan_for_all(key, batch)
            self._publish(key, others)
            return self._remember(key, own, others), "planned"
        fetched = self._fetch(key)
        if fetched is not None:
            return self._remember(key, fetched, {}), "fetched"
        own, _ = self._plan(key, batch)
        return self._remember(key, own, {}), "replanned"

    def _remember(self, key: bytes, own: Payload, others: dict[int, bytes]) -> Payload:
        self._patience.learn(own.report.plan_s)
        self._cache[key] = _Cached(own, others)
        while len(self._cache) > self.settings.cache_size:
            self._cache.popitem(last=False)
        return own

    def _plan_for_all(self, key: bytes, batch: BatchSpec) -> tuple[Payload, dict[int, bytes]]:
        """Plan for the group; an error is published too, so that no rank waits for a plan that won't come."""
        try:
            return self._plan(key, batch)
        except Exception as error:
            text = f"rank {self.settings.rank} of the group could not plan it: {type(error).__name__}: {error}"
            secret = self.settings.address.secret
            others = {r: encode_error(key, text, secret) for r in range(self.world_size) if r != self.settings.rank}
            self._publish(key, others)
            raise

    def _plan(self, key: bytes, batch: BatchSpec) -> tuple[Payload, dict[int, bytes]]:
        """This rank's payload, and the encoded ones of the others if it is this rank's turn."""
        settings = self.settings
        plan = plan_batch(batch, settings.topology, settings.shape, settings.config)
        report = PlanReport.of(plan)
        others = {}
        if self.planner_of(key) == settings.rank:
            others = {
                p.rank: encode_plan(key, p, report, settings.address.secret)
                for p in plan.rank_plans
                if p.rank != settings.rank
            }
        return Payload(plan.rank(settings.rank), report), others

    def _publish(self, key: bytes, others: dict[int, bytes]) -> None:
        if not others:
            return
        try:
            self._bytes += self._shelf.put(key, others)
        except StoreError as error:
            self._trouble = str(error)
            return
        self.counts["published"] += 1

    def _tidy(self) -> None:
        try:
            self._bytes += self._shelf.tidy()
        except StoreError as error:
            self._trouble = str(error)

    def _fetch(self, key: bytes) -> Payload | None:
        """This rank's payload from the store, or None if it doesn't come or is not what it should be."""
        settings = self.settings
        patience, since = self._patience.seconds(), time.perf_counter()
        try:
            data = self._link.use(lambda store: store.get(name_of(key, settings.rank), patience))
            self._bytes += len(data)
            self._patience.hit(time.perf_counter() - since)
            payload = decode(key, data, settings.address.secret)
            _check(payload, settings)
            return payload
        except StoreTimeout:
            self._trouble = f"no plan came within {patience:.3g} s"
            self._patience.miss()
        except StoreError as error:
            self._trouble = str(error)
        except PlanningFailed:
            raise
        except PayloadError as error:
            self.counts["refused"] += 1
            logger.error("hf_dcp: rank %d refuses a plan from the store and makes it itself: %s", settings.rank, error)
        return None


@dataclass
class _Cached:
    own: Payload
    others: dict[int, bytes]
    """Encoded payloads of the other ranks, where this rank planned."""


def _leave(signum: int, frame: Any) -> None:
    """A DataLoader ends workers that still wait for a plan by SIGTERM: that is to clean up, too."""
    raise SystemExit(0)


def _check(payload: Payload, settings: PlanSettings) -> None:
    """Raise PayloadError unless the plan is for this rank of this group and this model."""
    plan = payload.rank_plan
    for name, got, want in (
        ("rank", plan.rank, settings.rank),
        ("node_of_rank", plan.node_of_rank, settings.topology.node_of_rank),
        ("shape", plan.shape, settings.shape),
        ("reduce_dtype", plan.reduce_dtype, settings.config.reduce_dtype or settings.shape.dtype),
        ("num_tokens", plan.num_tokens, payload.report.tokens),
    ):
        if got != want:
            raise PayloadError(f"the plan's {name} is {got}, not {want}")
