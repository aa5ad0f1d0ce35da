"""The length tool: hand-worked shares, brute force, the script, and the page in a real browser."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_trl.data.lengths import Lengths, candidates, cost_of, measure, padding_share, write_page
from lean_trl.data.tokenizer import Tokenizer
from tests.browser import Page, open_page

from .fixtures import write_jsonl
from .test_formats import read


def flat(values: list[int], kind: str = "sft") -> Lengths:
    lengths = np.array(values)
    return Lengths(kind, lengths, lengths, np.full_like(lengths, 2), {"tokens": lengths})


def test_hand_worked_case() -> None:
    cost = cost_of(flat([10, 20, 30, 40, 1000]), 64)
    assert cost.rows_cut == 0.2 and cost.tokens_cut == pytest.approx(936 / 1100)
    dropped = cost_of(flat([10, 20, 30, 40, 1000], "reward"), 64)
    assert dropped.rows_dropped == 0.2 and dropped.tokens_cut == pytest.approx(1000 / 1100)
    assert dropped.fill == {}


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_padding_is_the_average_over_all_micro_batches(rows: int) -> None:
    lengths = [1, 4, 4, 7, 2]
    longest = [max(batch) for batch in itertools.product(lengths, repeat=rows)]
    expected = 1 - np.mean(lengths) / np.mean(longest)
    assert padding_share(np.array(lengths), rows) == pytest.approx(expected)


def test_packing_fill() -> None:
    fill = cost_of(flat([7, 3, 4, 2, 1]), 5).fill
    assert fill == {
        "bfd": 1.0,
        "bfd_split": pytest.approx(17 / 20),
        "wrapped": pytest.approx(17 / 20),
    }


def test_measured_rows(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": "abc", "completion": "d"}, {"text": "ab"}]
    lengths = measure(read(rows, tok, tmp_path).store, "sft")
    assert lengths.sequences.tolist() == [5, 3] and lengths.needed.tolist() == [4, 2]
    pairs = [
        {"prompt": "ab", "chosen": "c", "rejected": "def"},
        {"prompt": "a", "chosen": "bb", "rejected": "b"},
    ]
    lengths = measure(read(pairs, tok, tmp_path / "pairs", "preference").store, "preference")
    assert {name: values.tolist() for name, values in lengths.series.items()} == {
        "prompt": [2, 1],
        "chosen": [4, 4],
        "rejected": [6, 3],
        "sum": [10, 7],
    }
    assert lengths.longest.tolist() == [6, 4] and lengths.needed.tolist() == [3, 2]
    assert cost_of(lengths, 2).rows_dropped == 0.5
    prompts = measure(
        read([{"prompt": "abc"}], tok, tmp_path / "prompts", "prompt").store, "prompt"
    )
    assert list(prompts.series) == ["prompt"] and cost_of(prompts, 2).rows_dropped == 1.0


def test_candidates_suit_the_data() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 0.7, 10_000).astype(int) + 1
    found = candidates(flat(lengths.tolist()))
    assert found == sorted(set(found)) and 3 <= len(found) <= 12
    assert any(0.9 < np.mean(lengths <= limit) < 1 for limit in found)


def test_the_script(tok: Tokenizer, tmp_path: Path, root: Path) -> None:
    rows = write_jsonl(
        tmp_path / "rows.jsonl", [{"q": "a" * n, "a": "b"} for n in (8, 18, 28, 38, 998)]
    )
    page = tmp_path / "page.html"
    command = [
        sys.executable,
        str(root / "scripts" / "lengths.py"),
        str(rows),
        "--tokenizer",
        str(tok.folder),
    ]
    command += ["--columns", "{text: '{q}{a}'}", "--max-length", "64", "--html", str(page)]
    command += ["--cache-dir", str(tmp_path / "cache")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if line.split()[:1] == ["64"])
    assert line.split()[1:4] == ["20.0%", "85.1%", "0.0%"]
    assert "5 rows, 1100 tokens" in result.stdout and "####" in result.stdout
    assert "http" not in page.read_text()


def test_what_is_wrong_ends_in_one_line(tok: Tokenizer, tmp_path: Path, root: Path) -> None:
    command = [sys.executable, str(root / "scripts" / "lengths.py"), str(tmp_path), "--tokenizer"]
    result = subprocess.run([*command, str(tok.folder)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "holds no files of rows" in result.stderr


def test_image(tmp_path: Path) -> None:
    from lean_trl.data.lengths import write_image

    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(ValueError, match=r"lean_trl\[plot\]"):
            write_image(flat([1, 2]), tmp_path / "a.png", "title")
    else:
        write_image(flat([1, 2]), tmp_path / "a.png", "title")
        assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


# -- the page --

MOVE = "const s = document.getElementById('slider'); s.value = arguments[0];"
MOVE += "s.dispatchEvent(new Event('input'));"
CELLS = "return [...document.querySelectorAll('td[data-name]')].map("
CELLS += "cell => [cell.dataset.name, cell.innerText])"


def shown(page: Page, limit: int) -> dict[str, float]:
    """The shares that the page shows once its slider has been moved to `limit`."""
    page.run(MOVE, limit)
    return {name: float(text.removesuffix(" %")) for name, text in page.run(CELLS)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "preference", "reward", "prompt"])
def test_moving_the_slider_changes_the_numbers(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    paired = kind in ("preference", "reward")
    sequences = np.maximum(rng.lognormal(4, 0.8, 600).astype(int), 2)
    longest = sequences.reshape(-1, 2).max(1) if paired else sequences
    needed = np.maximum(longest // 3, 2)
    lengths = Lengths(kind, sequences, longest, needed, {"tokens": sequences})
    page = tmp_path / "page.html"
    write_page(lengths, 4, page, "A title with </script> & more")
    seen: list[Any] = []
    with open_page(page) as opened:
        for limit in (33, 64, 200):
            numbers, cost = shown(opened, limit), cost_of(lengths, limit, 4)
            expected = {
                "rows cut": cost.rows_cut,
                "tokens cut": cost.tokens_cut,
                "rows dropped": cost.rows_dropped,
                "padding, micro-batches of 4": cost.padding,
                "padding, padding-free": 0.0,
                **{f"packing fill, {name}": fill for name, fill in cost.fill.items()},
            }
            assert numbers == {
                name: pytest.approx(100 * share, abs=0.006) for name, share in expected.items()
            }
            seen.append(json.dumps(numbers))
        assert opened.complaints() == []
    assert len(set(seen)) == 3
