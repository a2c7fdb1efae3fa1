"""What compilation of every shipped kernel configuration gave, kept in a file: so that tests see in a moment whether a
kernel or a tile shape has changed since, and whether one spills, without compiling for a quarter of an hour."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hf_dcp.bench.compiled import ALLOWED_SPILLS, CAPABILITIES, Compiled, Variant, problems_of, variants

REMAKE = "run python benchmarks/compile_kernels.py"
BEGIN, END = "<!-- made by benchmarks/compile_kernels.py -->\n", "<!-- until here -->\n"


@dataclass
class Record:
    """Compiled variants, and the version of Triton that made them."""

    triton: str
    compiled: list[Compiled] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Record:
        found = json.loads(path.read_text())
        return cls(found["triton"], [Compiled(**one) for one in found["compiled"]])

    def save(self, path: Path) -> None:
        lines = ",\n  ".join(json.dumps(asdict(one)) for one in self.compiled)
        path.write_text(f'{{"triton": {json.dumps(self.triton)}, "compiled": [\n  {lines}\n]}}\n')

    def missing(self) -> Iterator[tuple[Variant, int]]:
        """Shipped variants that aren't recorded as they are now, with the compute capability."""
        recorded = {(one.variant, one.capability, one.digest) for one in self.compiled}
        for variant in variants():
            digest = variant.digest
            yield from ((variant, c) for c in CAPABILITIES if (variant.name, c, digest) not in recorded)

    def problems(self, triton: str) -> list[str]:
        """Why this record isn't good: made by another Triton, out of date, incomplete, or of kernels that spill."""
        found = [f"recorded with Triton {self.triton}, and {triton} is here: {REMAKE}"] * (self.triton != triton)
        found += [f"{v.name} on sm_{c} is not recorded as it is now: {REMAKE}" for v, c in self.missing()]
        shipped = {(variant.name, c) for variant in variants() for c in CAPABILITIES}
        recorded = [(one.variant, one.capability) for one in self.compiled]
        found += [f"{name} on sm_{c} is recorded, and not shipped: {REMAKE}" for name, c in set(recorded) - shipped]
        found += [f"{name} on sm_{c} is recorded twice" for name, c in set(recorded) if recorded.count((name, c)) > 1]
        found += [text for one in self.compiled for text in problems_of(one)]
        spilled = {(one.variant, one.capability) for one in self.compiled if one.spilled}
        return found + [
            f"{n} on sm_{c} is in ALLOWED_SPILLS, and spills nothing" for n, c in ALLOWED_SPILLS.keys() - spilled
        ]

    def table(self) -> str:
        """Markdown: a line for each variant, and for each GPU registers, bytes of shared memory, bytes spilled."""
        by = {(one.variant, one.capability): one for one in self.compiled}
        names = dict.fromkeys(one.variant for one in self.compiled)
        lines = [
            "| kernel | " + " | ".join(f"sm_{c}" for c in CAPABILITIES) + " |",
            "|---" * (1 + len(CAPABILITIES)) + "|",
        ]
        for name in names:
            cells = (by[name, c] for c in CAPABILITIES)
            lines.append(
                f"| {name} | " + " | ".join(f"{x.registers} / {x.shared:,} / {x.spilled}" for x in cells) + " |"
            )
        reasons = [f"- {name} on sm_{c}: {reason}" for (name, c), reason in ALLOWED_SPILLS.items()]
        count = f"{len(self.compiled)} compilations of {len(names)} variants by Triton {self.triton}."
        return "\n".join([count, "", *lines, "", *(["Spills and their reasons:", "", *reasons, ""] if reasons else [])])


def with_table(page: str, record: Record) -> str:
    """The page with the record's table between its two marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + record.table() + END + rest.split(END)[1]
