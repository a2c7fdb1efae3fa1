"""Real, long-tailed text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

NUM_FILES = 250
VOCABULARY = 4096


def standard_library(work_dir: Path, num_files: int = NUM_FILES) -> Dataset:
    """The text of ``num_files`` source files: columns ``path`` and ``text``. Made once, then read from ``work_dir``."""
    name = f"stdlib-{sys.version_info.major}.{sys.version_info.minor}-{num_files}"

    def build(folder: Path) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        files = source_files(root, num_files)
        texts = [path.read_text("utf-8", errors="replace") for path in files]
        paths = [str(path.relative_to(root)) for path in files]
        Dataset.from_dict({"path": paths, "text": texts}).save_to_disk(str(folder))

    return load_from_disk(str(make_once(work_dir / name, build)))


def standard_library_tokenizer(work_dir: Path, vocabulary: int = VOCABULARY) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer trained on `standard_library`. Made once, then read from ``work_dir``."""

    def build(folder: Path) -> None:
        train_tokenizer(standard_library(work_dir)["text"], vocabulary).save_pretrained(str(folder))

    name = f"tokenizer-{sys.version_info.major}.{sys.version_info.minor}-{vocabulary}"
    return AutoTokenizer.from_pretrained(str(make_once(work_dir / name, build)))


def source_files(root: Path, num_files: int) -> list[Path]:
    """``num_files`` Python files below ``root``, the same ones on every machine that has the same files."""
    found = [path for path in root.rglob("*.py") if not {"site-packages", "__pycache__"} & set(path.parts)]
    found = [path for path in found if path.stat().st_size > 0]
    found.sort(key=lambda path: hashlib.blake2b(str(path.relative_to(root)).encode(), digest_size=8).digest())
    return found[:num_files]


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of so many entries; every byte string can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def make_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``build`` if it isn't there. Nobody sees it half made; a second builder is harmless."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        build(partial)
        os.chmod(partial, 0o755)
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
