"""The figures of a memory benchmark as one page of HTML.

The page holds its picture, its script and its style: it can be mailed or kept beside a commit.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import Runs, loss_difference, size
from report import COLUMNS, columns_of, figure, losses
from walks import Plan

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem;
       color: #1b1b1b; background: #fff }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd;
         white-space: nowrap }
th:first-child, td:first-child, .left { text-align: left }
th[data-key] { cursor: pointer; user-select: none; vertical-align: bottom; white-space: normal }
th[aria-sort=ascending]::after { content: " \\25b2" }
th[aria-sort=descending]::after { content: " \\25bc" }
tbody tr:hover { background: #f3f6fa }
.bad { color: #b00020; font-weight: 600 }
.note { color: #666; font-size: .85em }
.scroll { overflow-x: auto }
img { max-width: 100% }
summary { cursor: pointer; padding: .2rem 0 }
"""
# Cells carry their number in data-value; text sorts as text, empty cells come last.
SCRIPT = """
for (const head of document.querySelectorAll("th[data-key]")) {
  head.onclick = () => {
    const table = head.closest("table"), column = head.cellIndex, body = table.tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const order = (a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const numbers = !isNaN(x) && !isNaN(y);
      return (up ? 1 : -1) * (numbers ? x - y : x.localeCompare(y));
    };
    body.append(...[...body.rows].sort(order));
  };
}
"""


def report_html(
    title: str,
    plan: Plan,
    runs: Mapping[str, Runs],
    about: Mapping[str, str],
    picture: Path | None,
) -> str:
    """One page that needs nothing else: a sortable table, the picture, the largest holders."""
    keys = columns_of(runs)
    heads = ["arm", *keys, "loss_difference"]
    labels = ["arm", *(COLUMNS[key][0] for key in keys), "loss differs by"]
    head = "".join(
        f'<th data-key="{key}">{html.escape(label)}</th>'
        for key, label in zip(heads, labels, strict=True)
    )
    rows = "".join(
        _html_row(name, arm, keys, runs["none"], name not in plan.inexact)
        for name, arm in runs.items()
    )
    image = ""
    if picture is not None:
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f'<img alt="stacked bars of each peak" src="data:image/png;base64,{data}">'
    parts = [
        f"<h1>Memory per technique: {html.escape(title)}</h1>",
        '<p class="note">Click a heading to sort. Medians of the repeats; (ratio to the arm '
        "without techniques), +- half the spread.</p>",
        f'<div class="scroll"><table id="arms"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>",
        image,
        "<h2>Who holds the peak of live tensors</h2>",
        *(_html_holders(name, arm) for name, arm in runs.items() if arm.results),
        _html_list(plan.notes),
        _html_list(about),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}<script>{SCRIPT}</script></body></html>\n"
    )


def _html_row(name: str, arm: Runs, keys: Sequence[str], base: Runs, exact: bool) -> str:
    cells = [f"<td>{html.escape(name)}</td>"]
    if not arm.results:
        text = html.escape(arm.failure or "no result")
        cells.append(f'<td class="left bad" data-value="">{text}</td>')
        cells += ['<td data-value=""></td>'] * len(keys)
        return f"<tr>{''.join(cells)}</tr>"
    for key in keys:
        value = arm.median(key)
        cells.append(
            f'<td data-value="{"" if value is None else value}">{figure(arm, key, base)}</td>'
        )
    difference, text = loss_difference(arm, base), losses(arm, base, exact)
    style = ' class="bad"' if "NOT" in text else ""
    cells.append(f'<td{style} data-value="{"" if difference is None else difference}">{text}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)


def _html_holders(name: str, arm: Runs) -> str:
    rows = "".join(
        f"<tr><td>{size(h['nbytes'])}</td><td class=left>{h['category']}</td>"
        f"<td class=left>{html.escape(h['place'])}</td>"
        f"<td class=left>{h['count']} x {h['shape']} {h['dtype']}</td></tr>"
        for h in arm.results[0].get("largest", [])
    )
    return f"<details><summary>{html.escape(name)}</summary><table>{rows}</table></details>"


def _html_list(items: Mapping[str, str]) -> str:
    lines = (f"<li>{html.escape(k)}: {html.escape(v)}</li>" for k, v in items.items())
    return f"<ul class=note>{''.join(lines)}</ul>" if items else ""
