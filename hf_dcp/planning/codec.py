"""Rank plans as bytes: safetensors with a small JSON header. Reading them executes nothing."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from hf_dcp.planning.batch import ModelShape
from hf_dcp.planning.plan import PASSES, SCHEMA, Item, Message, PassPlan, RankPlan, Slice, WindowPlan


def digest_of(rank_plans: list[RankPlan]) -> int:
    """64-bit digest over the contents of all rank plans (their own digests left out)."""
    state = hashlib.blake2b(digest_size=8)
    for plan in rank_plans:
        state.update(json.dumps({**_header(plan), "digest": 0}, sort_keys=True).encode())
        for name, array in sorted(_arrays(plan).items()):
            state.update(f"{name}{array.shape}".encode())
            state.update(array.tobytes())
    return int.from_bytes(state.digest(), "little")


_PASS_COLUMNS = {"program": 2, "order": 0, "divisions": 0, "messages": len(Message), "q_runs": 2, "kv_runs": 2}
_WINDOW_COLUMNS = {"q_remote": 3, "kv_remote": 3, "items": len(Item), "slices": len(Slice)}


def _columns(windows: int) -> dict[str, int]:
    """Name of every array of a plan with so many windows -> its number of columns, 0 for a vector."""
    names = {"token_runs": 2}
    for i in range(windows):
        names |= {f"{i}.{name}": columns for name, columns in _WINDOW_COLUMNS.items()}
        names |= {f"{i}.{which}.{name}": c for which in PASSES for name, c in _PASS_COLUMNS.items()}
    return names


def _arrays(plan: RankPlan) -> dict[str, np.ndarray]:
    arrays = {"token_runs": plan.token_runs}
    for i, part in enumerate(plan.windows):
        arrays |= {f"{i}.{name}": getattr(part, name) for name in _WINDOW_COLUMNS}
        arrays |= {f"{i}.{which}.{name}": getattr(p, name) for which, p in part.passes() for name in _PASS_COLUMNS}
    return {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}


def _header(plan: RankPlan) -> dict[str, object]:
    shape = plan.shape
    return {
        "schema": SCHEMA,
        "rank": plan.rank,
        "node_of_rank": plan.node_of_rank,
        "digest": plan.digest,
        "num_tokens": plan.num_tokens,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
        "windows": shape.windows,
        "head_groups": plan.head_groups,
        "reduce_dtype": plan.reduce_dtype,
    }


def encode(plan: RankPlan) -> bytes:
    """Safetensors bytes of a rank plan. One metadata entry only: the order of several is not deterministic."""
    return save_safetensors(_arrays(plan), {"hf_dcp": json.dumps(_header(plan), sort_keys=True)})


def decode(data: bytes) -> RankPlan:
    """Inverse of `encode`. Raises ValueError if the bytes are no rank plan, or one of another schema version."""
    header, arrays = _read(data)
    try:
        shape = ModelShape(
            heads=header["heads"],
            kv_heads=header["kv_heads"],
            head_dim=header["head_dim"],
            dtype=header["dtype"],
            windows=tuple((window, layers) for window, layers in header["windows"]),
        )
        _check_arrays(arrays, _columns(len(shape.windows)))
        parts = []
        for i, (window, _) in enumerate(shape.windows):
            passes = [PassPlan(**{n: arrays[f"{i}.{which}.{n}"] for n in _PASS_COLUMNS}) for which in PASSES]
            own = {name: arrays[f"{i}.{name}"] for name in _WINDOW_COLUMNS}
            parts.append(WindowPlan(window=window, **own, forward=passes[0], backward=passes[1]))
        return RankPlan(
            rank=header["rank"],
            node_of_rank=tuple(header["node_of_rank"]),
            digest=header["digest"],
            num_tokens=header["num_tokens"],
            shape=shape,
            head_groups=header["head_groups"],
            reduce_dtype=header["reduce_dtype"],
            token_runs=arrays["token_runs"],
            windows=tuple(parts),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the bytes are no rank plan: {error!r}") from error


def _read(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Header and arrays of safetensors bytes, the schema version checked first."""
    try:
        size = int.from_bytes(data[:8], "little")
        raw = json.loads(data[8 : 8 + size]) if size <= len(data) - 8 else {}
        header = json.loads(raw["__metadata__"]["hf_dcp"])
        schema = header["schema"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"the bytes are no rank plan: no readable header ({type(error).__name__})") from error
    if schema != SCHEMA:
        raise ValueError(f"the rank plan has schema version {schema!r}; this version of hf_dcp reads {SCHEMA}")
    try:
        return header, load_safetensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"the bytes are no rank plan: {error}") from error


def _check_arrays(arrays: dict[str, np.ndarray], columns: dict[str, int]) -> None:
    if arrays.keys() != columns.keys():
        odd = sorted(arrays.keys() ^ columns.keys())
        raise ValueError(f"the bytes are no rank plan: missing or unknown arrays {', '.join(odd[:5])}")
    for name, width in columns.items():
        array = arrays[name]
        if array.dtype != np.int32 or array.ndim != (2 if width else 1) or (width and array.shape[1] != width):
            raise ValueError(f"the bytes are no rank plan: array {name} is {array.dtype}{list(array.shape)}")
