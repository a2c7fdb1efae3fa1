"""Scenes against brute force: what is drawn is exactly what the mask attends to, once, by who computes it."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hf_dcp.config import DcpConfig
from hf_dcp.masks import parse_mask
from hf_dcp.planning.batch import BatchSpec, ModelShape, Topology
from hf_dcp.planning.plan import Plan
from hf_dcp.planning.planner import plan_batch
from hf_dcp.planning.simulate import HARDWARE, simulate
from hf_dcp.view.colours import HUES, device_colours
from hf_dcp.view.scene import Scene, Tile, make_scene, read_plans

RATES = HARDWARE["a100-efa"]
LENGTHS = (160, 65, 40, 3)
MASKS = ("causal", "full", "window:20", "lambda:5,23", "blockwise:16,2,1,1", "shared:0.2x4")


def plan_of(mask: str, groups: int = 1, lengths: tuple[int, ...] = LENGTHS) -> Plan:
    shape = ModelShape(heads=4, kv_heads=2, head_dim=16)
    config = DcpConfig(block_size=16, head_groups=groups)
    return plan_batch(BatchSpec(lengths, parse_mask(mask)), Topology.grid(2, 2), shape, config)


def covered(tile: Tile) -> set[tuple[int, int]]:
    """(query, key) elements of a tile: those whose point (q + 1/4, k + 1/2) lies inside, by the even-odd rule."""
    whole = [tile.q, tile.k, tile.q, tile.k + tile.k_count]
    whole += [tile.q + tile.q_count, tile.k + tile.k_count, tile.q + tile.q_count, tile.k]
    found: Counter[tuple[int, int]] = Counter()
    for polygon in tile.polygons or [whole]:
        corners = list(zip(polygon[::2], polygon[1::2]))
        for q in range(tile.q, tile.q + tile.q_count):
            y = q + 0.25
            cuts = []
            for (q0, k0), (q1, k1) in zip(corners, corners[1:] + corners[:1]):
                if (q0 <= y) != (q1 <= y):
                    cuts.append(k0 + (y - q0) * (k1 - k0) / (q1 - q0))
            for k in range(tile.k, tile.k + tile.k_count):
                found[q, k] += sum(cut < k + 0.5 for cut in cuts) % 2
    assert set(found.values()) <= {0, 1}, "polygons of a tile overlap"
    return {at for at, times in found.items() if times}


def attended(mask: str, length: int) -> set[tuple[int, int]]:
    return {
        (q, k)
        for q, row in enumerate(parse_mask(mask).ranges(length))
        for lo, hi in row.tolist()
        for k in range(lo, hi)
    }


def elements(scene: Scene, sequence: int, group: int) -> Counter[tuple[int, int]]:
    tiles = [tile for tile in scene.tiles if tile.sequence == sequence and tile.group == group]
    return Counter(at for tile in tiles for at in covered(tile))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mask", MASKS)
def test_tiles_show_every_attended_element_once(mask: str, groups: int) -> None:
    scene = make_scene(plan_of(mask, groups).rank_plans, RATES, lengths=LENGTHS)
    for sequence, length in enumerate(LENGTHS):
        for group in range(groups):
            drawn = elements(scene, sequence, group)
            assert set(drawn) == attended(mask, length)
            assert set(drawn.values()) == {1}


def test_a_missing_tile_would_be_seen() -> None:
    scene = make_scene(plan_of("causal").rank_plans, RATES, lengths=LENGTHS)
    scene.tiles.pop()
    assert any(set(elements(scene, s, 0)) != attended("causal", n) for s, n in enumerate(LENGTHS))


@pytest.mark.parametrize("mask", MASKS)
def test_owners_and_bytes_are_those_of_the_plan(mask: str) -> None:
    plan = plan_of(mask)
    scene = make_scene(plan.rank_plans, RATES, lengths=LENGTHS)
    for sequence, view in enumerate(scene.sequences):
        owner = np.full(view.length, -1)
        for begin, count, device in view.owners:
            assert (owner[begin : begin + count] == -1).all()
            owner[begin : begin + count] = device
        mine = plan.blocks.sequence == sequence
        assert owner.tolist() == np.repeat(plan.placement.block_device[mine], plan.blocks.size[mine]).tolist()
    for which, view_of_pass in scene.passes.items():
        matrix, node = np.array(view_of_pass.bytes), plan.topology.node
        foreign = node[:, None] != node[None]
        assert matrix[foreign].sum() == plan.score.passes[which].inter_node
        assert matrix[~foreign].sum() == plan.score.passes[which].intra_node


def test_the_timeline_is_that_of_the_prediction() -> None:
    plan = plan_of("causal")
    scene = make_scene(plan.rank_plans, RATES, lengths=LENGTHS)
    for which, view in scene.passes.items():
        assert view.seconds == simulate(plan.rank_plans, which, RATES).total_s
        assert max(end for *_, end in view.spans) == pytest.approx(view.seconds)
        for device in range(4):
            times = [(begin, end) for d, _, _, begin, end in view.spans if d == device]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))
            done = [n for d, kind, n, *_ in view.spans if (d, kind) == (device, "attend")]
            assert done == sorted(done)
            assert max(done, default=0) < view.divisions
    for tile in scene.tiles:
        assert 0 <= tile.forward < scene.passes["forward"].divisions
        assert 0 <= tile.backward < scene.passes["backward"].divisions


@pytest.mark.parametrize("mask", ["causal", "full", "window:20", "lambda:5,23"])
def test_sequences_are_found_in_saved_plans(mask: str, tmp_path: Path) -> None:
    plan = plan_of(mask)
    for rank_plan in plan.rank_plans:
        (tmp_path / f"rank_{rank_plan.rank:05d}.safetensors").write_bytes(rank_plan.to_bytes())
    scene = make_scene(read_plans(tmp_path), RATES)
    assert scene.to_dict() == make_scene(plan.rank_plans, RATES, lengths=LENGTHS).to_dict()


def test_folders_without_one_whole_plan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no rank plans"):
        read_plans(tmp_path)
    plans = plan_of("causal").rank_plans
    (tmp_path / "rank_00000.safetensors").write_bytes(plans[0].to_bytes())
    with pytest.raises(ValueError, match="not all of one"):
        read_plans(tmp_path)
    (tmp_path / "rank_00000.safetensors").write_bytes(b"no plan")
    with pytest.raises(ValueError, match="something else than rank plans"):
        read_plans(tmp_path)


def luminance(colour: str, matrix: np.ndarray | None = None) -> np.ndarray:
    """CIE L*a*b* of ``#rrggbb``, as seen through a matrix on linear RGB."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    if matrix is not None:
        linear = np.clip(matrix @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(xyz / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


BLIND = {  # Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def least_difference(colours: list[str], matrix: np.ndarray | None) -> float:
    seen = [luminance(colour, matrix) for colour in colours]
    return min(float(np.linalg.norm(a - b)) for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.parametrize("nodes", [(0,) * 8, (0, 0, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3)])
def test_colours_differ_for_everybody(nodes: tuple[int, ...]) -> None:
    colours = device_colours(nodes)
    assert len(set(colours)) == len(nodes)
    for matrix in (None, *map(np.array, BLIND.values())):
        assert least_difference(colours, matrix) > 7  # a just noticeable difference is about 2
    assert least_difference(["#ff0000", "#4f4f00"], np.array(BLIND["deuteranopia"])) < 60  # the simulation mixes these


def test_large_groups_have_a_hue_per_node() -> None:
    colours = device_colours([i // 8 for i in range(32)])
    assert len(set(colours)) == 32
    assert len(HUES) == 8
