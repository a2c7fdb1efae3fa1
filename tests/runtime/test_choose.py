"""Which kernels run where, and what the errors say."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_dcp.config import DcpConfig
from hf_dcp.planning.planner import plan_batch
from hf_dcp.runtime import DcpPlan
from hf_dcp.runtime.cases import Case
from hf_dcp.runtime.executor import Executor
from hf_dcp.runtime.kernels import choose
from hf_dcp.runtime.kernels.choose import choose_kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HERE = {"triton": "3.9.0", "flash-attn": "2.8.3"}


@pytest.fixture
def gpu(monkeypatch):
    """As if there were an H100, Triton and flash-attn."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(choose, "find_spec", lambda name: name.replace("_", "-") in HERE)
    monkeypatch.setattr(choose, "version", lambda name: HERE[name])
    return monkeypatch


def test_auto_is_aten_on_cpus_and_triton_on_gpus(gpu):
    assert choose_kernel("auto", CPU, "fp32", 5) == "aten"
    assert choose_kernel("auto", CUDA, "bf16", 128) == "triton"
    assert choose_kernel("auto", CUDA, "fp32", 64) == "triton"
    assert choose_kernel("flash", CUDA, "fp16", 80) == "flash"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("best", CPU, "fp32", 64), "kernel must be one of auto, aten, triton, flash, not 'best'"),
        (("aten", CUDA, "bf16", 64), '"aten" runs on CPUs, not on cuda: write kernel="auto"'),
        (("triton", CPU, "bf16", 64), '"triton" runs on CUDA GPUs, not on cpu'),
        (("flash", CPU, "bf16", 64), '"flash" runs on CUDA GPUs, not on cpu'),
        (("auto", CUDA, "fp64", 64), "not fp64: load the model as bf16"),
        (("flash", CUDA, "fp32", 64), "computes bf16, fp16, not fp32"),
        (("auto", CUDA, "bf16", 72), "head dims 16, 32, 48, 64, 80, 96, 128, 192, 256, not 72"),
    ],
)
def test_what_cannot_run_is_refused(gpu, arguments, message):
    with pytest.raises(ValueError) as error:
        choose_kernel(*arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_error_says_what_to_install(gpu):
    gpu.setitem(HERE, "triton", "3.1.0")
    with pytest.raises(ValueError, match=r"needs triton 3.4 or newer, not 3.1.0: pip install triton --upgrade"):
        choose_kernel("auto", CUDA, "bf16", 64)
    gpu.delitem(HERE, "triton")
    with pytest.raises(ValueError, match=r"needs triton 3.4 or newer, which is not installed: pip install triton"):
        choose_kernel("auto", CUDA, "bf16", 64)
    gpu.setitem(HERE, "triton", "3.9.0")
    gpu.delitem(HERE, "flash-attn")
    with pytest.raises(
        ValueError, match=r'flash_attn 2.7 or newer, which is not installed: pip install "hf-dcp\[flash\]"'
    ):
        choose_kernel("flash", CUDA, "bf16", 64)
    gpu.setitem(HERE, "kernels", "0.10.0")  # the kernel hub will do
    assert choose_kernel("flash", CUDA, "bf16", 64) == "flash"


def test_old_gpus_are_refused(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8.0 or newer, not a GPU"):
        choose_kernel("auto", CUDA, "bf16", 64)


def test_the_setting_travels_with_the_plan():
    case = Case("causal", (20,), 16)
    plan = plan_batch(case.batch, case.topology(1), case.shape(), case.config()).rank(0)
    own = DcpPlan(plan, kernel="triton")
    assert copy.copy(own).kernel == "triton" and own.to("meta").kernel == "triton"
    assert DcpPlan(plan).executor_class is Executor
    with pytest.raises(ValueError, match='"triton" runs on CUDA GPUs'):
        own.executor  # noqa: B018
    with pytest.raises(ValueError, match="kernel must be one of auto, aten, triton, flash, not 'fast'"):
        DcpConfig(kernel="fast")


def test_a_model_is_refused_at_set_up():
    """Before any batch is planned, when the model is bound to the settings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_dcp.integrations.binding import attach
    from hf_dcp.lookahead.session import Session

    sizes = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="dcp"))
    with pytest.raises(ValueError, match='"flash" runs on CUDA GPUs, not on cpu: write kernel="auto"'):
        attach(model, Session(DcpConfig(kernel="flash")))
    attach(model, Session(DcpConfig()))


def test_the_setting_does_not_change_the_plan():
    case = Case("causal", (300,), 16)
    plans = [plan_batch(case.batch, case.topology(2), case.shape(), DcpConfig(kernel=k)) for k in ("auto", "triton")]
    assert plans[0].digest == plans[1].digest
