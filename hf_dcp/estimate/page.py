"""An estimate as one HTML page, which needs no network."""

from __future__ import annotations

from html import escape
from pathlib import Path

from hf_dcp.estimate.plots import plots
from hf_dcp.estimate.run import Estimate
from hf_dcp.estimate.schemes import DCP
from hf_dcp.estimate.screen import COLUMNS, cells

STYLE = """
:root { color-scheme: light dark; --line: #8884; --box: #0072b21a; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
.verdict { font-size: 1.25rem; padding: 1rem 1.25rem; background: var(--box); border-left: 4px solid #0072b2; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: pre-line; }
th:first-child, td:first-child { text-align: left; }
tr.dcp { font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
"""


def write_page(answer: Estimate, file: Path) -> None:
    """Raises ValueError if the file can't be written, or matplotlib is missing."""
    text = page(answer)
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise ValueError(f"--html {file} can't be written ({error.strerror}): name another file") from error


def page(answer: Estimate) -> str:
    """The page's text."""
    asked, tokens = answer.question, answer.lengths.tokens
    facts = [
        f"{len(tokens):,} rows, {int(tokens.sum()):,} tokens ({answer.lengths.source})",
        f"{len(answer.outcomes)} of {answer.batches_in_all} batches of at most {asked.tokens_per_batch:,} tokens, mask "
        f"{asked.mask}, on {asked.topology.num_nodes} node(s) with {asked.topology.world_size} devices together",
        f"model: {asked.model.source}",
        f"rates: {asked.hardware.describe()} ({asked.hardware.name}: {asked.hardware.source})",
        f"planning takes {answer.plan_s:.2f} s of CPU per batch",
        *answer.notes,
    ]
    head = "".join(f"<th scope=col>{escape(column)}</th>" for column in COLUMNS)
    rows = "".join(
        f"<tr{' class=dcp' if name == DCP else ''}>"
        + "".join(f"<td>{escape(v)}</td>" for v in cells(name, one).values())
        for name, one in answer.schemes.items()
    )
    figures = "".join(
        f"<figure role=img aria-label='{escape(title)}'><figcaption>{escape(title)}</figcaption>{svg}</figure>"
        for title, svg in plots(answer).items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Would DCP help?</title><style>{STYLE}</style><h1>Would DCP help?</h1>"
        f"<p class=verdict>{escape(answer.verdict)}</p><ul>{''.join(f'<li>{escape(fact)}' for fact in facts)}</ul>"
        f"<h2>Per step</h2><div class=wide><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<h2>Plots</h2><div class=plots>{figures}</div></html>\n"
    )
