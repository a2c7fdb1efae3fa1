"""Questions with ranked answers that are made offline: functions and what they do; words and what they mean."""

from __future__ import annotations

import ast
import random
import sys
from collections import defaultdict
from pathlib import Path

from data.text import make_once, standard_library
from datasets import Dataset, load_from_disk

WORDNET = Path("/usr/share/wordnet")
"""Where Debian's package wordnet-base puts WordNet's files."""
ANSWERS = 4


def functions(work_dir: Path, longest: int = 6000, least: int = 0) -> Dataset:
    """Functions of Python's standard library: ``question`` is the source without its docstring, ``answers`` are first
    lines of docstrings, the best first: its own, one of the same file, one of another file, and that one without its
    last half.

    Args:
        longest, least: characters of a question.
    """
    name = f"functions-{sys.version_info.major}.{sys.version_info.minor}-{least}-{longest}"

    def build(folder: Path) -> None:
        found = _described(standard_library(work_dir))
        by_file = defaultdict(list)
        for path, _, said in found:
            by_file[path].append(said)
        draw = random.Random(0)
        rows = []
        for path, source, said in found:
            near = [other for other in by_file[path] if other != said]
            far = [other for other_path, _, other in draw.sample(found, 3) if other_path != path and other != said]
            if near and far and least <= len(source) <= longest:
                words = far[0].split()
                answers = [said, draw.choice(near), far[0], " ".join(words[: len(words) // 2])]
                rows.append({"question": f"{source}\n# In one line:\n", "answers": answers})
        draw.shuffle(rows)
        Dataset.from_list(rows).save_to_disk(str(folder))

    return load_from_disk(str(make_once(work_dir / name, build)))


def _described(files: Dataset) -> list[tuple[str, str, str]]:
    """(file, source without docstring, first line of the docstring) of functions."""
    found = []
    for path, text in zip(files["path"], files["text"]):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # test data of the standard library holds both
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            said = (ast.get_docstring(node) or "").partition("\n")[0].strip()
            if len(said.split()) < 4:
                continue
            doc = node.body[0]
            assert doc.end_lineno is not None
            body = lines[node.lineno - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
            found.append((path, "\n".join(body), said))
    return found


def wordnet(folder: Path = WORDNET, least_uses: int = 1) -> Dataset:
    """ "What does WORD mean?", with the glosses of its four most used senses, the most used first.

    Args:
        folder: with WordNet's ``index.noun`` and ``data.noun``.
        least_uses: senses that were met in WordNet's tagged texts, at least.

    Raises:
        ValueError: if WordNet isn't there.
    """
    index, data = folder / "index.noun", folder / "data.noun"
    if not index.exists() or not data.exists():
        raise ValueError(f"WordNet is not in {folder}: install the package wordnet-base, or name its folder")
    content = data.read_bytes()
    rows = []
    for line in index.read_text("utf-8").splitlines():
        if line.startswith(" "):  # the licence
            continue
        parts = line.split()
        count = int(parts[2])
        tagged = int(parts[-count - 1])
        if count < ANSWERS or tagged < max(least_uses, ANSWERS):
            continue
        glosses = [_gloss(content, int(offset)) for offset in parts[-count:][:ANSWERS]]
        if len(set(glosses)) == ANSWERS:
            rows.append({"question": f"What does {parts[0].replace('_', ' ')} mean?\n", "answers": glosses})
    random.Random(0).shuffle(rows)
    return Dataset.from_list(rows)


def _gloss(content: bytes, offset: int) -> str:
    line = content[offset : content.index(b"\n", offset)].decode("utf-8")
    return line.partition(" | ")[2].strip()
