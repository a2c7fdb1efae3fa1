"""The parts of benchmarks/training.py: plans of dense zigzag in place of DCP's, texts, the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_dcp import masks
from hf_dcp.config import DcpConfig
from hf_dcp.planning import BatchSpec, ModelShape, Topology
from hf_dcp.planning.check import check
from hf_dcp.planning.plan import Message
from hf_dcp.planning.simulate import RowBytes, message_bytes

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import training

SHAPE, TOPOLOGY = ModelShape(4, 2, 16, "fp32"), Topology.grid(4, 1)


def test_dense_zigzag_is_exact_and_sends_every_row_everywhere() -> None:
    batch = BatchSpec([301, 64, 7], masks.sliding_window(16))
    dense = training.dense_zigzag(batch, TOPOLOGY, SHAPE, DcpConfig())
    check(batch, dense.rank_plans, minimal=False)
    rows = RowBytes.of(SHAPE, dense.rank_plans[0].head_groups, "fp32")
    sent = 0
    for plan in dense.rank_plans:
        program = plan.windows[0].forward
        sent += message_bytes(program, rows, "forward")[program.messages[:, Message.INCOMING] == 0].sum()
    assert sent == batch.num_tokens * 3 * SHAPE.kv_heads * SHAPE.head_dim * 2 * 4


def test_texts_are_as_long_as_the_data_set_says(tmp_path: Path) -> None:
    file = training.write_texts("longalign_10k", tmp_path, count=200)
    lengths = np.array([len(json.loads(line)["text"]) for line in file.read_text().splitlines()]) / training.CHARACTERS
    table = training.read_distributions()["longalign_10k"]
    assert len(lengths) == 200
    assert np.median(lengths) == pytest.approx(table.at(np.array(0.5)) / training.SHRUNK, rel=0.25)


def test_table_shows_medians_without_the_first_steps(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "results.jsonl"
    steps = {"dcp": [9.0, 9.0, 1.0, 2.0, 3.0, 2.0], "zigzag": [9.0, 9.0, 5.0, 4.0, 3.0, 4.0]}
    file.write_text(json.dumps({"cell": ["ldc_reconstructed", 2048, "causal"], "steps_s": steps}) + "\n")
    training.table(file)
    said = capsys.readouterr().out
    assert "| ldc_reconstructed | 2048 | causal | 2.00 | 4.00 | 2.00 |" in said
    assert "causal: 2.00 to 2.00, median 2.00" in said
