"""RESULTS.md, where measured figures live, and the README's table, which is made from it.

    python benchmarks/results.py                       # README from RESULTS.md
    python benchmarks/results.py rows.json [...]       # new rows first (peers.py writes such files)

A row replaces the one of the same figure and machine. Nothing here computes a figure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness import ROOT, markdown

RESULTS, README = ROOT / "benchmarks" / "RESULTS.md", ROOT / "README.md"
HEADER = ("figure", "lean_trl", "TRL", "ratio", "machine", "commit", "command")
ROWS, START, END = "<!-- rows -->", "<!-- from benchmarks/RESULTS.md -->", "<!-- end -->"
README_FIGURES = (
    ": tokens per CPU second",
    ": peak RSS",
    ": peak of live tensors",
    "import of the trainer, CPU",
    "preparing the rows, CPU",
    "packing 1 M lengths (bfd), CPU",
)


class Row(NamedTuple):
    """A figure, ours and the peer's in words; where and how it was measured."""

    figure: str
    ours: str
    peer: str
    ratio: str = ""
    machine: str = ""
    commit: str = ""
    command: str = ""


def save_rows(rows: Sequence[Row], about: Mapping[str, str], path: Path) -> None:
    """Rows with what they were measured on, for this script to put into RESULTS.md."""
    machine = (
        f"{about['hardware']}; {about['versions']}; {about['peer']}; threads: {about['threads']}; "
        f"load {about['load']} before"
    )
    filled = [
        row._replace(machine=machine, commit=about["commit"], command=f"`{about['command']}`")
        for row in rows
    ]
    path.write_text(json.dumps([row._asdict() for row in filled], indent=1), encoding="utf-8")


def read_table(text: str) -> list[Row]:
    """The rows; their machine is a name, M1, M2, ..."""
    lines = [line for line in between_marks(text).splitlines() if line.startswith("|")]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines[2:]]


def read_machines(text: str) -> dict[str, str]:
    """{M1: what it is}."""
    lines = between_marks(text).splitlines()
    return dict(line[2:].split(": ", 1) for line in lines if line.startswith("- M"))


def between_marks(text: str) -> str:
    """The part of RESULTS.md that this script writes."""
    return text.split(ROWS, 1)[1].split(END, 1)[0]


def merge(text: str, new: Sequence[Row]) -> str:
    """RESULTS.md with new rows between its marks; one of a figure that is there replaces it."""
    rows, machines = read_table(text), read_machines(text)
    for row in new:
        name = next((n for n, known in machines.items() if known == row.machine), None)
        if name is None:
            name = f"M{1 + max((int(n[1:]) for n in machines), default=0)}"
            machines[name] = row.machine
        row = row._replace(machine=name)
        at = [i for i, old in enumerate(rows) if old.figure == row.figure]
        if at:
            rows[at[0]] = row
        else:
            rows.append(row)
    used = {row.machine for row in rows}
    listed = "".join(f"- {name}: {what}\n" for name, what in machines.items() if name in used)
    before, rest = text.split(ROWS, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{ROWS}\n{listed}\n{markdown(HEADER, rows)}{END}{after}"


def readme_table(text: str) -> str:
    """The block of the README: main figures, and on what."""
    rows = [row for row in read_table(text) if any(part in row.figure for part in README_FIGURES)]
    if not rows:
        return f"{START}\nNo figures yet.\n{END}"
    machines = read_machines(text)
    used = dict.fromkeys(row.machine for row in rows)
    table = markdown(HEADER[:4], [row[:4] for row in rows])
    notes = "".join(f"{machines[name]}.\n" for name in used)
    return f"{START}\n{table}\n{notes}{END}"


def update_readme(readme: str, results: str) -> str:
    """The README with its block made anew."""
    before, rest = readme.split(START, 1)
    after = rest.split(END, 1)[1]
    return before + readme_table(results) + after


def main() -> None:
    text = RESULTS.read_text(encoding="utf-8")
    for file in sys.argv[1:]:
        text = merge(text, [Row(**row) for row in json.loads(Path(file).read_text())])
    RESULTS.write_text(text, encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(update_readme(readme, text), encoding="utf-8")


if __name__ == "__main__":
    main()
