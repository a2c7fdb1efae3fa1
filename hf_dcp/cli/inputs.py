"""Arguments of commands that plan: from text to a batch, a topology, a model shape and settings."""

from __future__ import annotations

from pathlib import Path

from hf_dcp.bench.batches import Named, read_batches, read_json, require_lengths, shortened
from hf_dcp.config import DTYPE_BYTES, DcpConfig
from hf_dcp.masks import Mask, parse_mask
from hf_dcp.planning.batch import BatchSpec, ModelShape


def read_batch(lengths: str | None, file: Path | None, mask: str) -> BatchSpec:
    """The batch of ``--lengths`` or of the file of ``--batch``; ``mask`` is for sequences that name none.

    Raises:
        ValueError: if not exactly one of them is given, or their contents are no batch.
    """
    if (lengths is None) == (file is None):
        raise ValueError("give either --lengths, such as --lengths 4096,512, or --batch FILE.json")
    default = parse_mask(mask)
    if file is None:
        batch = BatchSpec(parse_lengths(lengths or ""), default)
    else:
        batch = read_batch_file(file, default)
    for i, (length, own) in enumerate(zip(batch.lengths, batch.masks, strict=True)):
        try:
            own.positions(length)
        except ValueError as error:
            raise ValueError(f"sequence {i}: {error}") from error
    return batch


def read_named(lengths: str | None, file: Path | None, divide: int, limit: int | None) -> list[Named]:
    """The batches of ``--lengths`` or of the file of ``--batches``, as ``--divide`` and ``--limit`` want them.

    Raises:
        ValueError: if not exactly one of the two is given, or their contents are no batches.
    """
    if (lengths is None) == (file is None):
        raise ValueError("give either --lengths, such as --lengths 4096,512, or --batches FILE.json")
    named = [("0", parse_lengths(lengths or ""))] if file is None else read_batches(file)
    return shortened(named, divide, limit)


def parse_lengths(text: str) -> list[int]:
    """Comma-separated lengths in tokens."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--lengths must be integers with commas between, such as 4096,512, not {text!r}") from None


def read_batch_file(file: Path, default: Mask) -> BatchSpec:
    """A list of lengths, or ``{"sequences": [{"length": L, "mask": SPEC}, ...]}``."""
    content = read_json("--batch", file, "a list such as [4096, 512]")
    if isinstance(content, list):
        require_lengths(f"--batch {file}", content)
        return BatchSpec(content, default)
    sequences = content.get("sequences") if isinstance(content, dict) else None
    if not isinstance(sequences, list):
        raise ValueError(f'--batch {file} must hold a list of lengths, or {{"sequences": [{{"length": 512}}, ...]}}')
    found, masks = [], []
    for i, entry in enumerate(sequences):
        if not isinstance(entry, dict) or "length" not in entry or not isinstance(entry.get("mask", ""), str):
            raise ValueError(f'--batch {file}: sequence {i} must be like {{"length": 512, "mask": "causal"}}')
        found.append(entry["length"])
        masks.append(parse_mask(entry["mask"]) if "mask" in entry else default)
    return BatchSpec(found, masks)


def parse_windows(texts: list[str]) -> tuple[tuple[int | None, int], ...]:
    """Windows with their number of layers: ``none``, ``none:4``, ``4096:20``, commas between or one per use."""
    windows: list[tuple[int | None, int]] = []
    for part in ",".join(texts).split(","):
        window, _, layers = part.strip().partition(":")
        try:
            windows.append((None if window == "none" else int(window), int(layers) if layers else 1))
        except ValueError:
            raise ValueError(f"--windows must be like none:4,4096:20 (window:layers), not {part!r}") from None
    return tuple(windows)


def read_shape(heads: int, kv_heads: int, head_dim: int, dtype: str, windows: list[str]) -> ModelShape:
    """Raises ValueError for numbers that don't fit each other, or an unknown type."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
    return ModelShape(heads, kv_heads, head_dim, dtype, parse_windows(windows))


def auto_or_count(option: str, text: str) -> int | str:
    """``auto``, or an integer of at least 1; typed as DcpConfig wants it."""
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f'{option} must be an integer of at least 1 or "auto", not {text!r}')
    return int(text)


def _auto_or_number(option: str, text: str) -> float | str:
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise ValueError(f"{option} can't be {text!r}: write a number, such as 0.1, or auto") from None


def read_config(block_size: str, head_groups: str, **settings: object) -> DcpConfig:
    """Settings from options; those that are None keep their defaults."""
    given = {name: value for name, value in settings.items() if value is not None}
    given["block_size"] = auto_or_count("--block-size", block_size)
    given["head_groups"] = auto_or_count("--head-groups", head_groups)
    if "epsilon" in given:
        given["epsilon"] = _auto_or_number("--epsilon", str(given["epsilon"]))
    return DcpConfig().with_changes(**given)
