"""What a plan store holds: a rank plan and its report, in a frame that says what it is.

The frame names the format, the schema version, the batch (by its key), the length and a checksum, and is checked before
anything inside is looked at. The checksum is keyed with a secret that the ranks of a run share and the store doesn't know:
who can write to the store can't make a plan that is taken. The inside is JSON and safetensors: data, never code.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from hf_dcp.lookahead.report import PlanReport
from hf_dcp.planning.plan import SCHEMA, RankPlan

MAGIC = b"hf_dcp\x00\x01"
KEY_BYTES = 32
_FRAME = struct.Struct("<8sII32sQ16s")


class PayloadError(ValueError):
    """Bytes from a store that are not the payload that was asked for."""


class PlanningFailed(ValueError):
    """The rank that plans this batch could not; the text is its error."""


class _Kind(IntEnum):
    PLAN = 0
    ERROR = 1


@dataclass(frozen=True)
class Payload:
    """One rank's plan for one batch, as it travels."""

    rank_plan: RankPlan
    report: PlanReport


def encode_plan(key: bytes, rank_plan: RankPlan, report: PlanReport, secret: bytes = b"") -> bytes:
    """The payload of a plan; ``secret``, of at most 64 bytes, keys its checksum."""
    text = report.to_json().encode()
    return _frame(key, _Kind.PLAN, struct.pack("<I", len(text)) + text + rank_plan.to_bytes(), secret)


def encode_error(key: bytes, text: str, secret: bytes = b"") -> bytes:
    """The payload that tells the other ranks why there is no plan."""
    return _frame(key, _Kind.ERROR, text.encode()[:65536], secret)


def decode(key: bytes, data: bytes, secret: bytes = b"") -> Payload:
    """Inverse of `encode_plan`.

    Raises:
        PayloadError: if the bytes are something else than a whole payload for this key; the text says what was found.
        PlanningFailed: if the payload is an error.
    """
    kind, body = _open(key, data, secret)
    if kind == _Kind.ERROR:
        raise PlanningFailed(body.decode(errors="replace"))
    try:
        size = int.from_bytes(body[:4], "little")
        if size > len(body) - 4:
            raise ValueError("its report is longer than the payload")
        return Payload(RankPlan.from_bytes(body[4 + size :]), PlanReport.from_json(body[4 : 4 + size]))
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the payload can't be read: {error}") from error


def _frame(key: bytes, kind: _Kind, body: bytes, secret: bytes = b"") -> bytes:
    return _FRAME.pack(MAGIC, SCHEMA, kind, key, len(body), _checksum(key, kind, body, secret)) + body


def _open(key: bytes, data: bytes, secret: bytes) -> tuple[int, bytes]:
    if len(data) < _FRAME.size:
        raise PayloadError(f"the payload has {len(data)} bytes, which is less than its frame of {_FRAME.size}")
    magic, schema, kind, found, length, checksum = _FRAME.unpack_from(data)
    body = data[_FRAME.size :]
    if magic != MAGIC:
        raise PayloadError(f"the payload begins with {magic!r} where {MAGIC!r} belongs")
    if schema != SCHEMA:
        raise PayloadError(f"the payload has schema version {schema}; this version of hf_dcp reads {SCHEMA}")
    if found != key:
        raise PayloadError(f"the payload is for batch {found.hex()[:16]}, not for {key.hex()[:16]}")
    if length != len(body):
        raise PayloadError(f"the payload has {len(body)} bytes where its frame says {length}")
    if kind not in tuple(_Kind):
        raise PayloadError(f"the payload is of the unknown kind {kind}")
    if not hmac.compare_digest(checksum, _checksum(key, kind, body, secret)):
        raise PayloadError("the payload's checksum is wrong: it is damaged, or not of this run")
    return kind, body


def _checksum(key: bytes, kind: int, body: bytes, secret: bytes) -> bytes:
    state = hashlib.blake2b(key, digest_size=16, key=secret)
    state.update(bytes([kind]))
    state.update(body)
    return state.digest()
