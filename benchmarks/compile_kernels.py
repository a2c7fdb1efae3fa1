#!/usr/bin/env python
"""Compiles every shipped configuration of the GPU kernels, no GPU needed, and records what each needs.

    python benchmarks/compile_kernels.py

compiles what has changed since the record (benchmarks/data/compiled_kernels.json) was made, anew all if Triton's version is
another one, and writes the record and the table in docs/gpu.md. It may be stopped and started again: what is compiled is
kept. Exit status 1 if something is left to do, or if a kernel spills where it must not.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import triton

from hf_dcp.bench.compiled import CAPABILITIES, compile_variant, variants
from hf_dcp.bench.compiled_record import Record, with_table

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "benchmarks" / "data" / "compiled_kernels.json", ROOT / "docs" / "gpu.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing more after so many seconds")
    until = time.monotonic() + parser.parse_args().seconds
    record = Record.load(RECORD) if RECORD.exists() else Record(triton.__version__)
    if record.triton != triton.__version__:
        record = Record(triton.__version__)
    for variant, capability in list(record.missing()):
        if time.monotonic() > until:
            break
        one = compile_variant(variant, capability)
        record.compiled = [old for old in record.compiled if old.name != one.name] + [one]
        record.save(RECORD)
        print(one)
    by = {(one.variant, one.capability): one for one in record.compiled}
    shipped = [(variant.name, capability) for variant in variants() for capability in CAPABILITIES]
    record.compiled = [by[key] for key in shipped if key in by]
    record.save(RECORD)
    if left := len(list(record.missing())):
        print(f"{left} configurations are left: start it again", file=sys.stderr)
        return 1
    PAGE.write_text(with_table(PAGE.read_text(), record))
    problems = record.problems(triton.__version__)
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
