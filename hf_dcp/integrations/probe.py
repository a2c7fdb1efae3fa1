"""What a model asks of attention, found by one forward of a copy that has shapes but no numbers.

Configurations name heads, windows and scales in many ways. A forward on the meta device shows them as they are: which
modules call attention, how often, with which shapes and with which features. It costs no memory and no arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only
from transformers import PreTrainedModel

from hf_dcp.integrations.attention import NAME
from hf_dcp.integrations.recorder import AttentionCall, Recorder

TOKENS = 4
_aten = torch.ops.aten


class ProbeFailure(RuntimeError):
    """The model can't run without numbers."""


@dataclass
class Probe:
    """What was seen.

    Args:
        calls: attention calls in order.
        convolutions: convolutions over more than one token.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    convolutions: int = 0


def model_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class of Transformers, from which FSDP2 makes one of its own."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def probe(model: PreTrainedModel) -> Probe:
    """One forward of a copy of ``model`` in training mode.

    Raises:
        ValueError: for what a call of attention asks of DCP and can't have.
        ProbeFailure: if the copy can't be made or run.
    """
    seen, recorder = Probe(), Recorder()
    try:
        with torch.device("meta"), _quiet():
            twin = model_class(model)._from_config(
                copy.deepcopy(model.config), attn_implementation=NAME, dtype=torch.bfloat16
            )
        ids = torch.arange(TOKENS)[None] % 2 + 1
        arguments = {"position_ids": torch.arange(TOKENS)[None], "use_cache": False, "dcp_plan": recorder}
        with torch.no_grad(), _WithoutNumbers(seen):
            twin.train()(input_ids=ids, **arguments)
    except ValueError:
        if recorder.refused:
            raise
        raise ProbeFailure(f"{type(model).__name__} could not be tried out without its weights") from None
    except Exception as error:
        raise ProbeFailure(f"{type(model).__name__} could not be tried out without its weights: {error}") from error
    seen.calls = recorder.calls
    return seen


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


class _WithoutNumbers(TorchDispatchMode):
    """Operators with a meta tensor among their arguments run on meta tensors; numbers read from those are 0."""

    def __init__(self, seen: Probe) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not tree_any(_is_meta, (args, kwargs)):
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else args[0].dtype.is_floating_point * 1.0 or 0
        if func is _aten.nonzero.default:
            return args[0].new_empty((0, args[0].ndim), dtype=torch.int64)
        if func is _aten.bincount.default:
            return args[0].new_empty((_argument(args, kwargs, 2, "minlength", 0),), dtype=torch.int64)
        if func is _aten.convolution.default and any(size > 1 for size in args[1].shape[2:]):
            self.seen.convolutions += 1
        args, kwargs = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _argument(args: tuple, kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    """An argument of an operator, given by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
