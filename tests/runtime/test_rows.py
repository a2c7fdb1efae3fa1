"""Equal calls made at once read and write the rows that they would one by one."""

from __future__ import annotations

import pytest
import torch

from hf_dcp.runtime.calls import Call, Kind
from hf_dcp.runtime.rows import Rows

CALLS = {
    "alone": Call(1, (3, 8), ((0, 4), (9, 12)), Kind.FULL),
    "apart": Call(1, (0, 5), ((2, 6),), Kind.FULL, None, 4, 7, (7,)),
    "touching": Call(0, (0, 5), ((2, 7),), Kind.FULL, None, 4, 5, (5,)),
    "overlapping": Call(1, (10, 14), ((0, 11),), Kind.FULL, None, 5, 4, (4,)),
    "with a sink": Call(0, (10, 14), ((0, 3), (5, 14)), Kind.FULL, None, 5, 4, (0, 4)),
    "remote": Call(1, (0, 4), ((41, 44), (50, 60)), Kind.FULL, None, 3, 4, (0, 4)),
}


def rows(tail: tuple[int, ...]) -> Rows:
    """40 local and 30 remote rows, 4 heads in 2 groups."""
    generator = torch.Generator().manual_seed(0)
    local = torch.randn(40, 4, *tail, generator=generator, dtype=torch.float64).transpose(0, 1)
    return Rows(local, torch.randn(30, 2, *tail, generator=generator, dtype=torch.float64), 40, 2)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tail", [(), (8,)])
def test_reading(name: str, tail: tuple[int, ...]) -> None:
    call, one = CALLS[name], rows(tail)
    for n, single in enumerate(call.single()):
        q = one.repeated(call.group, call.q, call.count, call.q_step)[n]
        assert torch.equal(q, one.at(call.group, *single.q))
        columns = torch.cat([one.at(call.group, *places) for places in single.kv], 1)
        assert torch.equal(one.gather(call)[n], columns)


@pytest.mark.parametrize("name", CALLS)
def test_adding(name: str) -> None:
    call, together, singly = CALLS[name], rows((8,)), rows((8,))
    columns = sum(end - begin for begin, end in call.kv)
    values = torch.randn(call.count, 2, columns, 8, dtype=torch.float64)
    together.scatter_add(call, values)
    for n, single in enumerate(call.single()):
        singly.scatter_add(single, values[n : n + 1])
    torch.testing.assert_close(together.local, singly.local)
    torch.testing.assert_close(together.remote, singly.remote)
    untouched = rows((8,))
    assert not torch.equal(together.local, untouched.local) or not torch.equal(together.remote, untouched.remote)
