"""Logits, loss and all gradients of many families of models on several ranks against one process without DCP."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hf_dcp
from hf_dcp.data.collator import DcpCollator
from hf_dcp.integrations.models import check_model
from tests.integrations.families import EXACT, POSITIONS, REFUSED, Family
from tests.integrations.small import IGNORE, VOCABULARY, gradients, relative_error, rows
from tests.multiprocess import run_ranks

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
LENGTHS = [37, 12, 50, 5]
TOLERANCE = 1e-5


def data_of(family: Family) -> list[dict[str, Any]]:
    batch = rows(LENGTHS)
    if family.position_rows:
        generator = torch.Generator().manual_seed(4)
        for row, length in zip(batch, LENGTHS):
            steps = torch.randint(0, 3, (family.position_rows, length), generator=generator)
            positions = steps.cumsum(-1)
            row["position_ids"] = (positions if family.position_rows > 1 else positions[0]).tolist()
    return batch


def stock_step(family: Family, batch: list[dict[str, Any]]) -> dict[str, Any]:
    """One process, one padded batch, the model's own attention: logits of the rows, loss, gradients."""
    model, longest = family.make(family.stock), max(LENGTHS)

    def padded(name: str, fill: int) -> Tensor:
        values = [torch.tensor(row[name]) for row in batch]
        parts = [torch.nn.functional.pad(v, (0, longest - v.shape[-1]), value=fill) for v in values]
        return torch.stack(parts, -2)

    arguments: dict[str, Any] = {"position_ids": torch.arange(longest)[None].expand(len(batch), -1)}
    if family.position_rows:
        arguments["position_ids"] = padded("position_ids", 0)
    mask = padded("length_mask", 0)
    labels = padded("labels", IGNORE)
    out = model(input_ids=padded("input_ids", 0), attention_mask=mask, labels=labels, use_cache=False, **arguments)
    out.loss.backward()
    logits = torch.cat([out.logits[i, :n] for i, n in enumerate(LENGTHS)]).detach()
    return {"logits": logits, "loss": float(out.loss.detach()), "gradients": gradients(model, family.unused)}


def dcp_step(
    family: Family, batch: list[dict[str, Any]], plugin: hf_dcp.DcpParallelismConfig, together: bool = True
) -> dict[str, Any]:
    """The same on all ranks; the logits of all of them. ``together`` False: every rank looks at its own positions alone."""
    model = family.make()
    plugin.attach(model)
    if not together:
        for module in model.modules():
            if hasattr(module, "rope_type"):
                module._forward_hooks.clear()
                module._forward_pre_hooks.clear()
    ddp = DistributedDataParallel(model, find_unused_parameters=family.unused)
    local = DcpCollator(plugin.session)(batch)
    items = torch.tensor(sum(sum(label != IGNORE for label in row["labels"][1:]) for row in batch))
    out = ddp(**local, num_items_in_batch=items, use_cache=False)
    (out.loss * dist.get_world_size()).backward()
    tokens = torch.from_numpy(local["dcp_plan"].rank_plan.local_tokens())
    logits = torch.zeros(sum(LENGTHS), VOCABULARY)
    if len(tokens):
        logits[tokens] = out.logits[0].detach()
    loss = out.loss.detach().clone()
    for value in (logits, loss):
        dist.all_reduce(value)
    return {"logits": logits, "loss": float(loss), "gradients": gradients(model, family.unused)}


def errors_of(
    family: Family, plugin: hf_dcp.DcpParallelismConfig, number: int, together: bool = True
) -> dict[str, float]:
    batch = data_of(family)
    for row in batch:
        row["length_mask"] = [1] * row["length"]
    got = dcp_step(family, batch, plugin, together)
    if number % dist.get_world_size() != dist.get_rank():  # one rank compares
        return {}
    want = stock_step(family, batch)
    names = got["gradients"].keys() & want["gradients"].keys()
    return {
        "logits": relative_error({"": got["logits"]}, {"": want["logits"]}),
        "loss": abs(got["loss"] - want["loss"]),
        "gradients": relative_error(got["gradients"], want["gradients"]),
        "parameters": float(len(names)),
    }


def families_on_ranks() -> dict[str, Any]:
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=dist.get_world_size(), dcp=hf_dcp.DcpConfig(block_size=8))
    plugin.setup()
    answers = {}
    for number, (name, family) in enumerate((EXACT | POSITIONS).items()):
        answers[name] = errors_of(family, plugin, number)
    for name in ("dynamic RoPE", "longrope"):
        answers[f"{name}, each rank its own"] = errors_of(POSITIONS[name], plugin, 0, together=False)
    return answers


def collect(world: int) -> dict[str, dict[str, float]]:
    answers: dict[str, dict[str, float]] = {}
    for result in run_ranks(families_on_ranks, world, timeout=400):
        answers |= {name: errors for name, errors in result.items() if errors}
    return answers


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, dict[str, float]]:
    return collect(2)


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, dict[str, float]]:
    return collect(4)


def check(errors: dict[str, float]) -> None:
    assert errors["parameters"] > 0
    for name in ("logits", "loss", "gradients"):
        assert errors[name] <= TOLERANCE, errors


@pytest.mark.parametrize("name", EXACT)
def test_family_on_two_ranks_equals_one_process(name: str, two_ranks: dict[str, dict[str, float]]) -> None:
    check(two_ranks[name])


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_on_two_ranks_equal_one_process(name: str, two_ranks: dict[str, dict[str, float]]) -> None:
    check(two_ranks[name])


@pytest.mark.parametrize("name", ["dynamic RoPE", "longrope"])
def test_positions_of_one_rank_alone_are_wrong(name: str, two_ranks: dict[str, dict[str, float]]) -> None:
    assert two_ranks[f"{name}, each rank its own"]["gradients"] > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*EXACT, *POSITIONS])
def test_family_on_four_ranks_equals_one_process(name: str, four_ranks: dict[str, dict[str, float]]) -> None:
    check(four_ranks[name])


@pytest.mark.parametrize("name", REFUSED)
def test_family_is_refused(name: str) -> None:
    make, reason = REFUSED[name]
    model = make()
    with pytest.raises(ValueError, match=reason):
        check_model(model)
