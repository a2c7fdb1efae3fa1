"""Look-ahead: what it derives, what contradicts it, and what it looks like in loader and Trainer."""

from __future__ import annotations

from typing import Any

import pytest

import hf_dcp
from hf_dcp.lookahead.depth import derive_depth
from tests.data.test_loader import loader
from tests.integrations.test_trainer import build, fresh


@pytest.mark.parametrize(
    ("given", "workers", "prefetch"),
    [
        ((None, None, None), 0, 0),
        ((None, 0, None), 0, 0),
        ((None, 3, None), 3, 2),
        ((None, 2, 5), 2, 5),
        ((0, None, None), 0, 0),
        ((0, 0, None), 0, 0),
        ((1, None, None), 1, 1),
        ((4, None, None), 2, 2),
        ((5, None, None), 2, 3),
        ((5, 2, 3), 2, 3),
        ((6, 3, None), 3, 2),
        ((7, None, 2), 4, 2),
    ],
)
def test_workers_and_prefetch_follow(given: tuple, workers: int, prefetch: int) -> None:
    depth = derive_depth(*given)
    assert (depth.workers, depth.prefetch) == (workers, prefetch)
    assert depth.lookahead >= (given[0] or 0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((4, 0, None), "lookahead=4 contradicts num_workers=0"),
        ((0, 2, None), "lookahead=0 contradicts num_workers=2"),
        ((4, 2, 4), r"num_workers=2 with prefetch_factor=4, which make 8: leave prefetch_factor out \(it would be 2\)"),
        ((8, 2, 2), "which make 4"),
        ((None, None, 2), "prefetch_factor=2 needs num_workers"),
        ((-1, None, None), "lookahead must be an integer of at least 0"),
        ((2, None, 0), "prefetch_factor must be an integer of at least 1"),
        ((True, None, None), "lookahead must be an integer"),
    ],
)
def test_contradictions_are_refused(given: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        derive_depth(*given)


def test_what_is_said() -> None:
    assert derive_depth(4, None, None).describe() == "look-ahead 4 (2 workers x 2 batches)"
    assert derive_depth(5, 2, None).describe() == "look-ahead 6 (2 workers x 3 batches, 5 asked for)"
    assert derive_depth(None, 0, None).describe().startswith("look-ahead 0: without DataLoader workers")


def test_of_the_loader(caplog: pytest.LogCaptureFixture) -> None:
    made = loader(lookahead=5, num_workers=2)
    assert (made._loader.num_workers, made._loader.prefetch_factor) == (2, 3)
    assert made.session.source().settings.keep == 14
    assert not caplog.records
    assert loader()._loader.num_workers == 0
    assert "look-ahead 0: without DataLoader workers every batch waits for its plan" in caplog.text
    with pytest.raises(ValueError, match="lookahead=4 contradicts num_workers=0"):
        loader(lookahead=4, num_workers=0)
    plugin = hf_dcp.DcpParallelismConfig(lookahead=3)
    with pytest.raises(ValueError, match="lookahead=4 here and 3 in DcpParallelismConfig"):
        plugin.plan_ahead(lookahead=4)


def test_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DCP_LOOKAHEAD", "6")
    assert hf_dcp.DcpParallelismConfig().plan_ahead().lookahead == 6
    assert hf_dcp.DcpParallelismConfig(lookahead=2).plan_ahead().lookahead == 2
    monkeypatch.setenv("HF_DCP_LOOKAHEAD", "many")
    with pytest.raises(ValueError, match="HF_DCP_LOOKAHEAD must be a number"):
        hf_dcp.DcpParallelismConfig()


def test_of_trainer(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def trainer(lookahead: int | None, **arguments: Any) -> Any:
        fresh()
        if lookahead is None:
            monkeypatch.delenv("HF_DCP_LOOKAHEAD", raising=False)
        else:
            monkeypatch.setenv("HF_DCP_LOOKAHEAD", str(lookahead))
        return build(1, max_steps=2, gradient_accumulation_steps=1, **arguments)

    made = trainer(5)
    assert (made.args.dataloader_num_workers, made.args.dataloader_prefetch_factor) == (2, 3)
    with caplog.at_level("WARNING", logger="hf_dcp"):
        made.train()
    assert "look-ahead 6 (2 workers x 3 batches, 5 asked for)" in caplog.text
    assert trainer(4, dataloader_num_workers=1).args.dataloader_prefetch_factor == 4
    with pytest.raises(ValueError, match="lookahead=4 contradicts"):
        trainer(4, dataloader_num_workers=1, dataloader_prefetch_factor=2)
    with pytest.raises(ValueError, match="lookahead=0 contradicts"):
        trainer(0, dataloader_num_workers=1)
    caplog.clear()
    with caplog.at_level("WARNING", logger="hf_dcp"):
        trainer(None).train()
    assert "look-ahead 0: without DataLoader workers every batch waits for its plan" in caplog.text
