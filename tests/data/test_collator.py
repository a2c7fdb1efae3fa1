"""The collator: labels and positions are those of the whole batch, whatever the cut."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_dcp
from hf_dcp.data.collator import DcpCollator
from hf_dcp.data.rows import RowReader
from hf_dcp.lookahead import planning
from hf_dcp.lookahead.session import Group, Session
from hf_dcp.lookahead.store import StoreAddress
from hf_dcp.planning.batch import ModelShape, Topology
from hf_dcp.planning.planner import plan_batch
from tests.runtime.placements import random_placement

SHAPE = ModelShape(heads=4, kv_heads=2, head_dim=8, dtype="fp32")


def collators(world: int, mask: Any = "causal", prefix: str = "test", **options: Any) -> list[DcpCollator]:
    """A collator for every rank of a group, all in this process."""
    made = []
    for rank in range(world):
        session = Session(hf_dcp.DcpConfig(block_size=4))
        topology = Topology.grid(1, world)
        session.group = Group(rank, topology, None, 0, 1, StoreAddress("local", prefix), timeout=0.0)
        session.bind(SHAPE)
        made.append(DcpCollator(session, mask, **options))
    return made


def reassemble(parts: list[dict[str, Any]], name: str) -> np.ndarray:
    """The tensors of all ranks, put back into the order of the whole batch."""
    total = parts[0]["dcp_plan"].rank_plan.num_tokens
    whole = np.full(total, -1, np.int64)
    for part in parts:
        tokens = part["dcp_plan"].rank_plan.local_tokens()
        whole[tokens] = part[name][0, : len(tokens)].numpy()
    return whole


def naive(rows: list[dict[str, Any]], masks: list[Any]) -> dict[str, list[int]]:
    """Token by token, from the definition."""
    answer: dict[str, list[int]] = {"input_ids": [], "position_ids": [], "shift_labels": []}
    for row, mask in zip(rows, masks):
        length = len(row["input_ids"])
        breaks = set(mask.segment_starts(length).tolist())
        labels = row.get("labels", row["input_ids"])
        answer["input_ids"] += row["input_ids"]
        answer["position_ids"] += mask.positions(length).tolist()
        for i in range(length):
            last = i == length - 1 or i + 1 in breaks
            answer["shift_labels"].append(-100 if last else labels[i + 1])
    return answer


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    world=st.integers(1, 4),
    kind=st.sampled_from(["causal", "shared", "documents", "function"]),
)
def test_parts_put_together_are_the_batch(lengths: list[int], world: int, kind: str) -> None:
    masks, rows, given_mask = [], [], "causal"
    for i, n in enumerate(lengths):
        row: dict[str, Any] = {"input_ids": [100 * i + t for t in range(n)]}
        if i % 2:
            row["labels"] = [-100] * (n // 2) + row["input_ids"][n // 2 :]
        if kind == "shared":
            answers = [n // 4, n // 3]
            row |= {"question_length": n - sum(answers), "answer_lengths": answers}
            masks.append(hf_dcp.shared_question(n - sum(answers), answers))
            given_mask = "shared_question"
        elif kind == "documents":
            row["document_lengths"] = [n - n // 2, n // 2] if n > 1 else [1]
            masks.append(hf_dcp.documents(row["document_lengths"]))
            given_mask = "documents"
        else:
            masks.append(hf_dcp.causal())
            given_mask = "causal" if kind == "causal" else (lambda row: hf_dcp.causal().ranges(len(row["input_ids"])))
        rows.append(row)
    parts = [collate(rows) for collate in collators(world, given_mask)]
    want = naive(rows, masks)
    for name in ("input_ids", "position_ids", "shift_labels"):
        assert reassemble(parts, name).tolist() == want[name], name
    for part in parts:
        local = part["dcp_plan"].rank_plan.num_local
        assert part["input_ids"].shape == (1, max(local, 1))
        assert torch.equal(part["labels"], part["shift_labels"]) and part["labels"].dtype == torch.int64
        assert local or part["labels"].tolist() == [[-100]]
    assert sum(part["dcp_plan"].rank_plan.num_local for part in parts) == sum(lengths)


def test_eight_tokens_cut_in_two_have_seven_labels() -> None:
    parts = [collate([{"input_ids": list(range(8))}]) for collate in collators(2)]
    assert all(part["dcp_plan"].rank_plan.num_local for part in parts)
    assert reassemble(parts, "shift_labels").tolist() == [1, 2, 3, 4, 5, 6, 7, -100]


def test_a_rank_without_tokens_gets_a_dummy_row(monkeypatch: pytest.MonkeyPatch) -> None:
    on_first = functools.partial(plan_batch, solver=random_placement(0, owners=1))
    monkeypatch.setattr(planning, "plan_batch", on_first)
    parts = [collate([{"input_ids": [5, 6, 7]}]) for collate in collators(3, prefix="empty", dummy_token=9)]
    assert [part["dcp_plan"].rank_plan.num_local for part in parts] == [3, 0, 0]
    for part in parts[1:]:
        assert part["input_ids"].tolist() == [[9]] and part["position_ids"].tolist() == [[0]]


def test_whole_batches_and_counts() -> None:
    (collate,) = collators(1, count_items=True)
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    assert collate([rows])["num_items_in_batch"] == collate(rows)["num_items_in_batch"] == 3
    with pytest.raises(ValueError, match="2 whole batches came at once: set per_device_train_batch_size"):
        collate([rows, rows])


@pytest.mark.parametrize(
    ("rows", "mask", "text"),
    [
        ([], "causal", "the batch has no sequence"),
        ([{"input_ids": []}], "causal", "row 0 of the batch has input_ids of shape"),
        ([{"text": "a"}], "causal", "row 0 of the batch has no input_ids"),
        ([{"input_ids": [1, 2], "labels": [1]}], "causal", "row 0 of the batch has 2 input_ids but 1 labels"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], "causal", "row 0 of the batch is padded"),
        ([{"input_ids": [1]}, {"input_ids": [1, 2]}], "shared:1,1", "row 0 of the batch: shared_question is for 2"),
        (
            [{"input_ids": [1]}],
            "shared_question",
            "row 0 of the batch: mask 'shared_question' needs the column question",
        ),
        ([{"input_ids": [1]}], lambda row: np.array([[[0, 2]]]), r"row 0 of the batch: ranges\[0, 0\] is \(0, 2\)"),
        ([{"input_ids": [1, 2]}], lambda row: np.array([[[0, 1]]]), "ranges are for 1 tokens"),
    ],
)
def test_bad_rows_are_named(rows: list[dict[str, Any]], mask: Any, text: str) -> None:
    (collate,) = collators(1, mask)
    with pytest.raises(ValueError, match=text):
        collate(rows)


@pytest.mark.parametrize("mask", ["casual", "window:0", 7])
def test_bad_masks_are_refused_at_once(mask: Any) -> None:
    with pytest.raises(ValueError, match="mask"):
        RowReader(mask)
