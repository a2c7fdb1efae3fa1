"""`hf-dcp bench kernels`: its report on a CPU, its references, and how it refuses what can't be."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hf_dcp.bench.kernel_contestants import dense_mask
from hf_dcp.cli.main import run
from hf_dcp.masks import parse_mask
from hf_dcp.ranges import normalise

SMALL = ["--device", "cpu", "--tokens", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--dtype", "fp32"]


def test_report_on_a_cpu(capsys):
    assert run(["bench", "kernels", *SMALL, "--mask", "causal", "--mask", "shared:0.2x4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["matmul_tflops"] > 0 and report["versions"]["torch"]
    assert len(report["checks"]) == 4 and {check["kernel"] for check in report["checks"]} == {"aten"}
    timed = [row for row in report["times"] if "ms" in row]
    assert {(row["mask"], row["kernel"], row["pass"]) for row in timed} == {
        (mask, kernel, which)
        for mask in ("causal", "shared:0.2x4")
        for kernel in ("aten", "SDPA")
        for which in ("forward", "backward")
    }
    for row in timed:
        assert row["of_matmul"] == pytest.approx(row["tflops"] / report["matmul_tflops"])
    skipped = {row["kernel"] for row in report["times"] if "skipped" in row}
    assert skipped == {"triton", "flash", "FlexAttention", "FlashAttention"}, "each says why"


def test_flops_count_attended_pairs(capsys):
    assert run(["bench", "kernels", *SMALL, "--mask", "window:16", "--seconds", "0", "--json"]) == 0
    assert "skipped" in json.loads(capsys.readouterr().out)["times"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device must be cuda or cpu, not 'tpu'"),
        (["--device", "cpu", "--dtype", "fp64"], "--dtype must be one of bf16, fp16, fp32 on cpu"),
        (["--device", "cpu", "--kv-heads", "3"], "--kv-heads must divide --heads 32, not be 3"),
        (["--device", "cpu", "--mask", "casual"], "casual"),
        (["--device", "cpu", "--tokens", "x"], "integers with commas"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert run(["bench", "kernels", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and len(captured.err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["bench", "kernels"], ["selftest", "--device", "cuda"]])
def test_without_a_gpu_it_says_so(command, capsys):
    assert run(command) == 2
    assert "--device cuda: torch finds no CUDA GPU here; write --device cpu" in capsys.readouterr().err


def test_dense_masks_are_those_of_the_ranges():
    for text in ("causal", "lambda:3,17", "shared:0.2x4", "blockwise:8,2,1,1"):
        ranges = normalise(parse_mask(text).ranges(50))
        want = np.zeros((50, 50), bool)
        for i, row in enumerate(ranges):
            for lo, hi in row:
                want[i, lo:hi] = True
        assert np.array_equal(dense_mask(ranges), want)
