"""One optimiser step of a small model on N ranks against one process, and what happens if a rule is broken."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import hf_dcp
from hf_dcp.data.collator import DcpCollator
from hf_dcp.lookahead import planning
from hf_dcp.planning.planner import plan_batch
from tests.integrations.controls import controls_on_ranks
from tests.integrations.small import (
    IGNORE,
    gradients,
    random_lengths,
    reference_loss,
    relative_error,
    rows,
    small_llama,
    small_qwen,
)
from tests.multiprocess import run_ranks
from tests.runtime.placements import random_placement

GRADIENT, PARAMETER = 1e-6, 1e-7


def _plugin(**changes: Any) -> hf_dcp.DcpParallelismConfig:
    config = hf_dcp.DcpConfig(block_size=8)
    return hf_dcp.DcpParallelismConfig(**({"dcp_size": dist.get_world_size(), "dcp": config} | changes))


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _clip(model: torch.nn.Module) -> float:
    grads = [p.grad for p in model.parameters()]
    norm = get_total_norm(grads)
    clip_grads_with_norm_(model.parameters(), 1.0, norm)
    return float(norm)


def _reference_steps(model: torch.nn.Module, steps: list[list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Train one process on steps of batches of rows: losses, norms, the gradients of the first step, parameters."""
    optimizer = _optimizer(model)
    answer: dict[str, Any] = {"loss": [], "norm": []}
    for step in steps:
        parts = [reference_loss(model, batch) for batch in step]
        loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
        optimizer.zero_grad()
        loss.backward()
        answer.setdefault("gradients", gradients(model))
        answer["loss"].append(float(loss.detach()))
        answer["norm"].append(_clip(model))
        optimizer.step()
    return answer | {"parameters": {n: p.detach().clone() for n, p in model.named_parameters()}}


def _dcp_steps(model: torch.nn.Module, loader: hf_dcp.DcpDataLoader, steps: int, accumulation: int) -> dict[str, Any]:
    ddp, batches = DistributedDataParallel(model), iter(loader)
    optimizer = _optimizer(model)
    answer: dict[str, Any] = {"loss": [], "norm": [], "rows": []}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for micro in range(accumulation):
            batch = next(batches)
            answer["rows"].append(batch["dcp_plan"].rank_plan.num_local)
            ddp.require_backward_grad_sync = micro == accumulation - 1
            out = ddp(**batch, use_cache=False).loss
            out.backward()
            loss += out.detach()
        answer.setdefault("gradients", gradients(model))
        dist.all_reduce(loss)
        answer["loss"].append(float(loss) / dist.get_world_size())
        answer["norm"].append(_clip(model))
        optimizer.step()
    return answer | {"parameters": {n: p.detach().clone() for n, p in model.named_parameters()}}


def _compare(got: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Errors of this rank, as JSON."""
    return {
        "loss": max(abs(a - b) for a, b in zip(got["loss"], want["loss"])),
        "norm": max(abs(a - b) / b for a, b in zip(got["norm"], want["norm"])),
        "gradient": relative_error(got["gradients"], want["gradients"]),
        "parameter": max(float((got["parameters"][n] - p).abs().max()) for n, p in want["parameters"].items()),
        "rows": got["rows"],
    }


def _batches(loader: hf_dcp.DcpDataLoader, count: int) -> list[list[dict[str, Any]]]:
    """The first batches of the group-wide order, uncut."""
    return [loader.dataset[i] for i in range(count)]


def steps_on_ranks(dp: int) -> dict[str, Any]:
    """Two steps of two batches each, for several kinds of model and data; every rank also computes the reference."""
    torch.manual_seed(0)
    plugin = _plugin(dcp_size=dist.get_world_size() // dp)
    plugin.setup()
    cases: dict[str, Any] = {}
    for name, make, lengths in (
        ("unequal labels", small_llama, random_lengths(24)),
        ("sliding window", small_qwen, random_lengths(24, seed=9)),
        ("empty ranks", small_llama, random_lengths(20, seed=11)),
    ):
        if name == "empty ranks":  # the first rank owns all tokens; tiles are computed anywhere
            planning.plan_batch = functools.partial(plan_batch, solver=random_placement(0, owners=1))
        model, data = make(), rows(lengths)
        loader = hf_dcp.DcpDataLoader(data, config=plugin, model=model, tokens_per_batch=100, accumulation=2)
        got = _dcp_steps(model, loader, 2, 2)
        flat = _batches(loader, 4 * dp)
        want = _reference_steps(make("sdpa"), [flat[: 2 * dp], flat[2 * dp :]])
        cases[name] = _compare(got, want)
    planning.plan_batch = plan_batch
    return cases


@pytest.mark.parametrize(("world", "dp"), [(3, 1), (4, 2)])
def test_steps_equal_one_process(world: int, dp: int) -> None:
    _check_steps(run_ranks(steps_on_ranks, world, dp, timeout=200), dcp_size=world // dp)


@pytest.mark.slow
def test_steps_equal_one_process_on_four_ranks() -> None:
    _check_steps(run_ranks(steps_on_ranks, 4, 1, timeout=200), dcp_size=4)


def _check_steps(results: list[dict[str, Any]], dcp_size: int) -> None:
    for rank, cases in enumerate(results):
        for name, errors in cases.items():
            message = f"{name} on rank {rank}: {errors}"
            assert errors["gradient"] <= GRADIENT and errors["norm"] <= GRADIENT, message
            assert errors["parameter"] <= PARAMETER, message
            assert errors["loss"] <= 1e-5, message
    # The case is what it says: in every batch some rank has nothing.
    empty = list(zip(*(cases["empty ranks"]["rows"] for cases in results[:dcp_size])))
    assert all(0 in counts for counts in empty) and all(sum(counts) > 0 for counts in empty)


MASKS = ("full", "window:7", "lambda:3,5", "blockwise:4,2,1,1", "shared_question", "documents")


def masks_on_ranks() -> dict[str, float]:
    """Relative gradient errors against the stock model under a dense mask, for every mask."""
    plugin = _plugin()
    plugin.setup()
    answers = {}
    for name in MASKS:
        batch = [row | _columns(len(row["input_ids"])) for row in rows([37, 12, 50, 5])]
        collate = DcpCollator(plugin.session, name)
        reference, model = small_llama("sdpa"), small_llama()
        total, items = torch.zeros(()), 0
        for row in batch:
            part, count = _dense_loss(reference, row, collate.reader._mask(0, row))
            total, items = total + part, items + count
        (total / items).backward()
        plugin.attach(model)
        ddp = DistributedDataParallel(model)
        loss = ddp(**collate(batch), num_items_in_batch=torch.tensor(items), use_cache=False).loss
        (loss * dist.get_world_size()).backward()
        answers[name] = relative_error(gradients(model), gradients(reference))
    return answers


def _columns(length: int) -> dict[str, Any]:
    answers = [length // 5, length // 3]
    parts = [length - length // 2, length // 2]
    return {"question_length": length - sum(answers), "answer_lengths": answers, "document_lengths": parts}


def _dense_loss(model: torch.nn.Module, row: dict[str, Any], mask: hf_dcp.Mask) -> tuple[torch.Tensor, int]:
    """Sum of losses of one row, and its labels: a dense mask, and labels that segments must not predict taken out."""
    length = len(row["input_ids"])
    allowed = torch.zeros(length, length, dtype=torch.bool)
    for i, ranges in enumerate(mask.ranges(length).tolist()):
        for lo, hi in ranges:
            allowed[i, lo:hi] = True
    labels = torch.tensor(row["labels"])
    labels[0] = IGNORE
    labels[torch.from_numpy(mask.segment_starts(length))] = IGNORE
    positions = torch.from_numpy(mask.positions(length))[None]
    ids = torch.tensor([row["input_ids"]])
    out = model(input_ids=ids, position_ids=positions, attention_mask=allowed[None, None], use_cache=False)
    loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], labels[1:], ignore_index=IGNORE, reduction="sum")
    return loss, int((labels[1:] != IGNORE).sum())


def on_two() -> dict[str, Any]:
    return {"steps": steps_on_ranks(1), "controls": controls_on_ranks(), "masks": masks_on_ranks()}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two, 2, timeout=200)


def test_steps_on_two_ranks_equal_one_process(on_two_ranks: list[dict[str, Any]]) -> None:
    _check_steps([result["steps"] for result in on_two_ranks], dcp_size=2)


def test_negative_controls_fail(on_two_ranks: list[dict[str, Any]]) -> None:
    for result in on_two_ranks:
        errors = dict(result["controls"])
        for name in ("right", "two forwards"):
            assert errors.pop(name) <= GRADIENT, name
        for name, error in errors.items():
            assert error > 1e3 * GRADIENT, f"{name} should be wrong, but its error is {error}"


def test_masks_equal_dense_masks_of_one_process(on_two_ranks: list[dict[str, Any]]) -> None:
    for result in on_two_ranks:
        for name, error in result["masks"].items():
            assert error <= GRADIENT, (name, error)


os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
