"""The line through peaks, rows of a known length for every kind, one real slope (slow)."""

import csv
import subprocess
import sys

import pytest
from harness import ROOT, child_environment
from slope import fit, rows_of

from lean_trl.config import DataConfig, ModelConfig
from lean_trl.data.drafts import Reader
from lean_trl.data.examples import read_row
from lean_trl.data.feed import reading
from lean_trl.data.tokenizer import load_tokenizer


def test_line_through_peaks():
    line = fit([100, 200, 400], [1500.0, 2000.0, 3000.0])
    assert line.intercept == pytest.approx(1000) and line.per_token == pytest.approx(5)
    assert line.error < 1e-9 and line.at(1000) == pytest.approx(6000)
    assert line.longest(6004) == 1000 and line.longest(500) == 0
    assert fit([1, 2, 3], [10.0, 30.0, 50.0 * 1.1]).error > 0.03
    with pytest.raises(ValueError, match="two different lengths"):
        fit([5, 5], [1.0, 2.0])
    with pytest.raises(ValueError, match="does not grow"):
        fit([1, 2], [5.0, 4.0]).longest(100)


@pytest.mark.parametrize("kind", ["sft", "preference", "reward", "unpaired"])
def test_rows_have_exactly_the_length(kind):
    rows = rows_of(kind, 31, 3)
    assert len(rows) == 3
    reader = Reader(reading(DataConfig(), kind), load_tokenizer(ModelConfig()))
    for row in rows:
        _, drafts = read_row(row, reader)
        lengths = [len(piece.ids) for draft in drafts for piece in draft.pieces]
        assert set(lengths) == {31}
        if kind in ("preference", "reward"):
            assert (drafts[0].pieces[0].ids != drafts[0].pieces[1].ids).any()
    if kind == "unpaired":
        assert [row["label"] for row in rows] == [True, False, True]


def test_online_rows_have_no_length():
    with pytest.raises(ValueError, match="prompt rows"):
        rows_of("prompt", 8, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_slope_of_the_built_in_model(tmp_path, method):
    command = [sys.executable, "benchmarks/memory.py", "recipes/sft.yaml", "--slope", "128,256,384"]
    command += ["--repeats", "1", "--steps", "1", "--warm-up", "1", "--budget-gib", "1"]
    command += ["--out", str(tmp_path), "--method", method, "--data.assistant_only_loss", "false"]
    if method == "dpo":
        command += ["--data.path", "x.jsonl", "--data.eval_split", "null"]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    *_, check = csv.DictReader(open(tmp_path / "slope.csv"))
    assert int(check["length"]) == 768
    assert float(check["peak_live"]) == pytest.approx(float(check["predicted"]), rel=0.03)
    assert "KiB per token" in (tmp_path / "slope.md").read_text()
