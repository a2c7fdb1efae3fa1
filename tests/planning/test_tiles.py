"""Tiles, their rows and their atoms against brute force over the dense mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp import masks
from hf_dcp.planning.batch import BatchSpec
from hf_dcp.planning.tiles import Atoms, Blocks, Intervals, Tiles, make_blocks, make_tiles
from tests.planning.strategies import batches, dense_mask


@st.composite
def cuts_of(draw: st.DrawFn, batch: BatchSpec) -> list:
    """A block size, or any starts, for every sequence."""
    entries: list = []
    for length in batch.lengths:
        starts = sorted(set(draw(st.lists(st.integers(0, length - 1), max_size=5))) | {0})
        entries.append(draw(st.one_of(st.integers(1, 16), st.just(np.array(starts)))))
    return entries


def rows_of(intervals: Intervals, tile: int) -> set[int]:
    spans = zip(intervals.begin, intervals.end, strict=True)
    picked = list(spans)[intervals.ptr[tile] : intervals.ptr[tile + 1]]
    rows = [row for begin, end in picked for row in range(begin, end)]
    assert len(rows) == len(set(rows)), "intervals of a tile overlap"
    return set(rows)


def atom_rows_of(atoms: Atoms, tile: int) -> set[int]:
    own = atoms.tile_atom[atoms.tile_ptr[tile] : atoms.tile_ptr[tile + 1]]
    return {row for a in own for row in range(atoms.begin[a], atoms.end[a])}


def expected_tiles(blocks: Blocks, mask: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    spans = [slice(s, s + n) for s, n in zip(blocks.start, blocks.size, strict=True)]
    pairs = ((i, j) for i in range(len(spans)) for j in range(len(spans)))
    return {(i, j): mask[spans[i], spans[j]] for i, j in pairs if mask[spans[i], spans[j]].any()}


def assert_tiles(blocks: Blocks, tiles: Tiles, mask: np.ndarray) -> None:
    expected = expected_tiles(blocks, mask)
    assert list(zip(tiles.q.tolist(), tiles.kv.tolist(), strict=True)) == sorted(expected)
    for t, ((i, j), part) in enumerate(sorted(expected.items())):
        assert tiles.area[t] == part.sum()
        q_rows = set((np.flatnonzero(part.any(1)) + blocks.start[i]).tolist())
        kv_rows = set((np.flatnonzero(part.any(0)) + blocks.start[j]).tolist())
        assert rows_of(tiles.q_rows, t) == atom_rows_of(tiles.q_atoms, t) == q_rows
        assert rows_of(tiles.kv_rows, t) == atom_rows_of(tiles.kv_atoms, t) == kv_rows


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_tiles_are_those_of_the_dense_mask(data: st.DataObject) -> None:
    batch = data.draw(batches())
    window = data.draw(st.one_of(st.none(), st.integers(1, 12)))
    blocks = make_blocks(batch, data.draw(cuts_of(batch)))
    assert_tiles(blocks, make_tiles(batch, blocks, window), dense_mask(batch, window))


def test_a_wrong_mask_is_noticed() -> None:
    batch = BatchSpec([20, 9], masks.causal())
    blocks = make_blocks(batch, 4)
    wrong = dense_mask(batch)
    wrong[15, 3] = False
    with pytest.raises(AssertionError):
        assert_tiles(blocks, make_tiles(batch, blocks), wrong)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_atoms_are_disjoint_and_as_long_as_possible(batch: BatchSpec) -> None:
    tiles = make_tiles(batch, make_blocks(batch, 7))
    for atoms in (tiles.q_atoms, tiles.kv_atoms):
        assert np.all(atoms.begin < atoms.end)
        assert np.all(atoms.end[:-1] <= atoms.begin[1:])
        wanted_by = [set() for _ in atoms.begin]
        for t in range(len(tiles)):
            for a in atoms.tile_atom[atoms.tile_ptr[t] : atoms.tile_ptr[t + 1]]:
                wanted_by[a].add(t)
        assert all(wanted_by)


def test_blocks_cover_every_sequence() -> None:
    blocks = make_blocks(BatchSpec([5, 1, 8], masks.causal()), [2, 4, np.array([0, 5])])
    assert blocks.start.tolist() == [0, 2, 4, 5, 6, 11]
    assert blocks.size.tolist() == [2, 2, 1, 1, 5, 3]
    assert blocks.sequence.tolist() == [0, 0, 0, 1, 2, 2]


@pytest.mark.parametrize("entry", [0, -3, np.array([1, 2]), np.array([0, 2, 2]), np.array([0, 9])])
def test_bad_cuts_are_refused(entry: object) -> None:
    with pytest.raises(ValueError, match="block"):
        make_blocks(BatchSpec([8], masks.causal()), [entry])
