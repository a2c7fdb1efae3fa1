"""`hf-dcp estimate` on the command line: JSON, one screen, a page, and what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from hf_dcp.cli.main import run
from hf_dcp.estimate.hardware import Hardware
from hf_dcp.estimate.model import read_model
from hf_dcp.planning.batch import ModelShape
from hf_dcp.planning.simulate import HARDWARE

SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--layers", "2", "--parameters", "1e6"]
SMALL += ["--nodes", "2", "--devices-per-node", "2", "--tokens-per-batch", "2048", "--processes", "1", "--batches", "3"]
LENGTHS = ",".join(str(n) for n in (1500, 30, 700, 64, 1999, 5, 812, 77, 300, 1024))


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert run(["estimate", LENGTHS, *SMALL, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--link-gbps", "1", "--device-tflops", "0.1")
    assert found["rows"] == 10
    assert sum(one["rows"] for one in found["histogram"]) == 10
    assert found["batches"] == 3 <= found["batches_in_all"]
    assert found["devices"] == 4
    assert found["hardware"]["inter_bytes"] == 1e9 / 8
    assert found["hardware"]["device_flops"] == 1e11
    dcp, zigzag = found["schemes"]["DCP"], found["schemes"]["zigzag"]
    assert dcp["speedup"] == 1.0
    assert zigzag["speedup"] == pytest.approx(zigzag["step_s"] / dcp["step_s"])
    assert zigzag["spread"][0] <= zigzag["spread"][1]
    assert found["verdict"].startswith("DCP would")


def test_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = answer(capsys), answer(capsys)
    for found in (first, again):
        found.pop("plan_cpu_s")
    assert first == again
    assert answer(capsys, "--seed", "1")["schemes"] != first["schemes"]


def test_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", LENGTHS, *SMALL]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110
    assert "…" not in text
    assert all(name in text for name in ("zigzag row-exact", "loongtrain", "A100", "10 rows, 6,511 tokens"))
    assert "DCP would" in text


def test_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(["estimate", LENGTHS, *SMALL, "--html", str(tmp_path / "a.html")]) == 0
    text = (tmp_path / "a.html").read_text("utf-8")
    assert text.count("<svg") == 4
    assert "DCP would" in text
    assert "<script" not in text and "src=" not in text


def test_a_folder_names_the_model(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = read_model(str(tmp_path))
    assert model.shape == ModelShape(4, 2, 8, "bf16", ((None, 3),))
    attention, mlp, norms = 32 * 32 * 2 + 2 * 32 * 16, 3 * 32 * 48, 2 * 32
    assert model.parameters == 3 * (attention + mlp + norms) + 32 + 100 * 32  # no input embedding
    assert model.flops_per_token == 6 * model.parameters


def test_rates_and_their_sources() -> None:
    given = Hardware.named("h100-ib").with_given(link_gbps=100)
    assert given.rates.inter_bytes == 12.5e9
    assert given.rates.device_flops == HARDWARE["h100-ib"].device_flops
    assert given.source.startswith("--link-gbps; else h100-ib")
    assert Hardware.named("h100-ib").with_given(1, 2, 3).source == "--link-gbps, --intra-gbps, --device-tflops"


def test_measured_rates(tmp_path: Path) -> None:
    measured = Hardware.named("a100-efa").calibrated(ModelShape(2, 1, 16, "fp32", ((None, 30),)))
    assert 1e6 < measured.rates.device_flops < 1e13
    assert measured.rates.inter_bytes == HARDWARE["a100-efa"].inter_bytes
    assert "inter_bytes" in measured.source
    measured.rates.write(tmp_path / "rates.json")
    assert Hardware.named(str(tmp_path / "rates.json")).rates == measured.rates


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hardware", "abacus"], "--hardware must be one of a100-efa"),
        (["--link-gbps", "0"], "--link-gbps must be a number above 0"),
        (["--tokens-per-batch", "0"], "--tokens-per-batch must be an integer of at least 1"),
        (["--batches", "0"], "--batches must be an integer of at least 1"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--parameters", "0"], "--parameters must be a number of at least 1"),
        (["--mask", "nonsense"], "mask"),
        (["--html", "no/where.html"], "--html no/where.html is in a folder that doesn't exist"),
        (["--model", "/nowhere"], "--model /nowhere has no configuration"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", LENGTHS, *SMALL, *words]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("hf-dcp estimate: ")
    assert message in err


@pytest.mark.slow
def test_ten_thousand_rows_in_a_minute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two cores, as many processes as CPUs; the numbers of a long-tailed data set."""
    rng = np.random.default_rng(0)
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps(np.minimum(rng.lognormal(8, 1.3, 10_000).astype(int) + 1, 131_072).tolist()))
    begin = time.monotonic()
    assert run(["estimate", str(file), "--nodes", "2", "--devices-per-node", "4", "--json"]) == 0
    assert time.monotonic() - begin < 60
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 10_000
    assert found["batches"] >= 10
