"""The plugin: sizes, mesh, what is shown and saved, refusals."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import TrainingArguments

import hf_dcp
from hf_dcp.integrations.environment import VARIABLES
from hf_dcp.integrations.process_groups import dcp_groups, dp_position

ROOT = Path(__file__).parents[2]
SECRET = "s3cret-pass"


@pytest.fixture
def fake_world() -> Any:
    """Eight processes of which only this one, rank 5, is there; collective calls do nothing."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_mesh_is_ordered_tp_dcp_dp(fake_world: Any) -> None:
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=2, tp_size=2)
    plugin.settle_sizes(8)
    mesh = super(hf_dcp.DcpParallelismConfig, plugin).build_device_mesh("cpu")
    assert mesh.mesh_dim_names == ("dp_replicate", "cp", "tp")
    # rank = tp + 2 * (dcp + 2 * dp)
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert dcp_groups(mesh) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dp_position(mesh) == (1, 2)
    assert [mesh.get_local_rank(name) for name in ("tp", "cp", "dp_replicate")] == [1, 0, 1]
    assert mesh["dp_shard_cp"].mesh.tolist() == [5, 7]
    assert sorted(mesh["dp_cp"].mesh.tolist()) == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"dcp_size": 8}, {"cp": 8}),
        ({"dcp_size": 4}, {"dp_replicate": 2, "cp": 4}),
        ({"dcp_size": 2, "dp_shard_size": 4}, {"dp_shard": 4, "cp": 2}),
        ({"dcp_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2}, {"dp_replicate": 2, "dp_shard": 2, "cp": 2}),
        ({"dcp_size": 1}, {"dp_replicate": 8}),
    ],
)
def test_data_parallelism_takes_what_is_left(sizes: dict[str, int], shape: dict[str, int]) -> None:
    plugin = hf_dcp.DcpParallelismConfig(**sizes)
    plugin.settle_sizes(8)
    assert dict(zip(*plugin._get_mesh())) == shape
    assert plugin.cp_size == 1 and not plugin.cp_enabled  # what Trainer must see
    assert plugin.total_size == 8


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dcp_size": 0}, "dcp_size must be at least 1"),
        ({"dcp_size": "4"}, "dcp_size must be an integer"),
        ({"dcp_size": 2, "cp_size": 2}, "cp_size=2 and sp_size=1 beside dcp_size=2"),
        ({"dcp_size": 2, "sp_size": 2}, "cp_size=1 and sp_size=2 beside dcp_size=2"),
        ({"plan_timeout": 0}, "plan_timeout must be above 0"),
        ({"plan_store": "carrier-pigeon"}, 'plan_store must be "torch", or a URL'),
        ({"dcp": {"block_size": 4}}, "dcp must be a DcpConfig, not dict"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hf_dcp.DcpParallelismConfig(**arguments)


@pytest.mark.parametrize("sizes", [{"dcp_size": 3}, {"dcp_size": 3, "tp_size": 2}, {"dcp_size": 2, "dp_shard_size": 3}])
def test_sizes_that_do_not_fit_the_world_are_refused(sizes: dict[str, int]) -> None:
    text = "does not divide the number of processes, 8|make 6 processes, but there are 8"
    with pytest.raises(ValueError, match=text):
        hf_dcp.DcpParallelismConfig(**sizes).settle_sizes(8)


def test_one_process_cannot_be_a_group_of_two() -> None:
    with pytest.raises(ValueError, match="does not divide the number of processes, 1: start a multiple of 2"):
        hf_dcp.DcpParallelismConfig(dcp_size=2).setup()


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HF_DCP_SIZE": "4",
        "HF_DCP_BLOCK_SIZE": "256",
        "HF_DCP_PLACEMENT": "zigzag",
        "HF_DCP_PLAN_STORE": "local",
        "HF_DCP_PLAN_TIMEOUT": "2.5",
    }.items():
        monkeypatch.setenv(name, value)
    plugin = hf_dcp.DcpParallelismConfig()
    assert (plugin.dcp_size, plugin.session.plan_store, plugin.plan_timeout) == (4, "local", 2.5)
    assert (plugin.dcp.block_size, plugin.dcp.placement) == (256, "zigzag")
    assert hf_dcp.DcpParallelismConfig(dcp_size=2).dcp_size == 2
    monkeypatch.setenv("HF_DCP_SIZE", "four")
    with pytest.raises(ValueError, match="HF_DCP_SIZE must be a number, not 'four'"):
        hf_dcp.DcpParallelismConfig()
    monkeypatch.setenv("HF_DCP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")  # from a YAML file of accelerate
    with pytest.raises(ValueError, match="cp_size=2"):
        hf_dcp.DcpParallelismConfig()


def test_a_variable_that_nobody_reads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DCP_SZIE", "4")
    with pytest.raises(ValueError, match="HF_DCP_SZIE is not known; HF_DCP_SIZE was perhaps meant"):
        hf_dcp.DcpParallelismConfig(dcp_size=1)


def test_every_variable_in_the_sources_is_known() -> None:
    sources = [*(ROOT / "hf_dcp").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    found = {name for path in sources for name in re.findall(r"HF_DCP_[A-Z_]*[A-Z]", path.read_text())}
    assert found - {"HF_DCP_REDIS"} <= VARIABLES.keys()


def test_several_processes_and_no_size_are_an_error() -> None:
    """A size in the parallelism_config of a YAML file never arrives: it must not be a silent 1."""
    with pytest.raises(ValueError, match="dcp_size is not given and there are 4 processes"):
        hf_dcp.DcpParallelismConfig().settle_sizes(4)
    hf_dcp.DcpParallelismConfig(dcp_size=1).settle_sizes(4)
    hf_dcp.DcpParallelismConfig().settle_sizes(1)


def test_a_password_is_never_shown_or_saved(tmp_path: Any) -> None:
    """Wherever training arguments go, a password in the address of the plan store does not."""
    plugin = hf_dcp.DcpParallelismConfig(dcp_size=1, plan_store=f"local://user:{SECRET}@host:6379/0")
    assert SECRET in plugin.session.plan_store
    AcceleratorState._reset_state(reset_partial_state=True)
    args = TrainingArguments(str(tmp_path), use_cpu=True, parallelism_config=plugin, report_to=[])
    buffer = io.BytesIO()
    torch.save(args, buffer)
    shown = [repr(plugin), str(plugin), repr(args), str(args), str(args.to_dict()), args.to_json_string()]
    shown += [str(args.to_sanitized_dict()), str(plugin.to_json()), repr(plugin.session)]
    assert not any(SECRET in text for text in shown)
    assert SECRET.encode() not in buffer.getvalue() + pickle.dumps(plugin) + pickle.dumps(plugin.session)
    with pytest.raises(ValueError) as error:
        hf_dcp.DcpParallelismConfig(plan_store=f"kafka://user:{SECRET}@host")
    assert SECRET not in str(error.value)


def test_copies_share_the_run() -> None:
    plugin = hf_dcp.DcpParallelismConfig()
    copies = [
        copy.copy(plugin),
        copy.deepcopy(plugin),
        pickle.loads(pickle.dumps(plugin)),  # noqa: TID251
    ]
    for other in copies:
        assert other.session is plugin.session
        assert other.to_json() == plugin.to_json()
    assert hf_dcp.DcpParallelismConfig().session is not plugin.session


def test_nothing_is_planned_before_group_and_model_are_known() -> None:
    plugin = hf_dcp.DcpParallelismConfig()
    collator = plugin.collator()
    with pytest.raises(ValueError, match="the DCP group is not set up"):
        collator([{"input_ids": [1, 2, 3]}])
    plugin.setup()
    with pytest.raises(ValueError, match="the model is not known to DCP"):
        collator([{"input_ids": [1, 2, 3]}])
