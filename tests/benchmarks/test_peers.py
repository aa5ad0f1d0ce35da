"""What both sides are given, how figures are compared, and the way into RESULTS.md and README."""

import json
from types import SimpleNamespace

import pytest
from harness import ROOT, Runs
from peers import (
    command_in_words,
    compared,
    conversations,
    rate,
    ratio,
    repeat_longest,
    same_work,
    training_arms,
)
from results import (
    END,
    README,
    RESULTS,
    ROWS,
    START,
    Row,
    merge,
    read_machines,
    read_table,
    readme_table,
    save_rows,
    update_readme,
)

from lean_trl.config import config_from_dict

EMPTY = f"# Results\n\ntext\n\n{ROWS}\n| a |\n| --- |\n{END}\nmore\n"


def test_gsm8k_becomes_conversations_and_other_rows_stay(tmp_path):
    rows = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = conversations(str(tmp_path / "in.jsonl"), 2, tmp_path / "out.jsonl")
    first, second = (json.loads(line) for line in open(out))
    assert first["prompt"] == [{"role": "user", "content": "q0"}]
    assert second["completion"] == [{"role": "assistant", "content": "a1"}]
    again = conversations(str(out), None, tmp_path / "again.jsonl")
    assert again.read_text() == out.read_text()


def test_the_longest_window_comes_once_more_at_the_end(tmp_path):
    file = tmp_path / "rows"
    file.write_text("a\nb\nlong\nc\nd\n")
    repeat_longest(file, 2)
    assert file.read_text() == "a\nb\nlong\nc\nd\nlong\nc\n"


@pytest.mark.parametrize("method", ["sft", "dpo", "reward"])
def test_both_sides_get_the_same_settings(method, tmp_path):
    options = SimpleNamespace(
        micro_batch_size=4, warm_up=3, steps=5, model="m", max_length=512, repeats=3
    )
    arms = list(training_arms(method, options, "peer", tmp_path, tmp_path / "rows"))
    assert [arm.name for arm in arms] == [
        "ours, checkpointing",
        "TRL, checkpointing",
        "ours, plain",
        "TRL, plain",
        "ours, plain, one row a micro-batch",
    ]
    for ours, theirs in zip(arms[0:4:2], arms[1:4:2], strict=True):
        config = config_from_dict(ours.job["config"])
        assert theirs.command[0] == "peer"
        assert config.train.batch_size == theirs.job["micro_batch_size"]
        assert config.train.learning_rate == theirs.job["learning_rate"]
        assert config.memory.activation_checkpointing == theirs.job["checkpointing"]
        assert config.data.max_length == theirs.job["max_length"]
        assert config.data.path == theirs.job["rows"]
        for key in ("warm_up", "steps"):
            assert ours.job[key] == theirs.job[key]
    small = config_from_dict(arms[4].job["config"]).train
    assert (small.micro_batch_size, small.batch_size) == (1, 4)


def test_medians_spread_and_ratio():
    ours = Runs("ours", [{"v": 30.0}, {"v": 20.0}, {"v": 40.0}])
    theirs = Runs("TRL", [{"v": 15.0}])
    row = compared("speed", ours, theirs, "v", rate)
    assert row[:4] == ("speed", "30.0 (20.0 to 40.0)", "15.0 (15.0 to 15.0)", "2.00x")


def test_ratios_have_two_digits_that_count():
    assert (ratio(1.736), ratio(0.66), ratio(0.0133)) == ("1.74x", "0.66x", "0.013x")


def test_commands_name_no_folder_of_this_machine():
    command = command_in_words(
        ["--python", "/a/b/python", "--model", "/c/m", "--rows=x", "--steps"]
    )
    assert command == "python benchmarks/peers.py --make --model m --rows=x --steps"


def test_other_losses_or_tokens_are_other_work():
    def arm(loss, tokens):
        return Runs("x", [{"losses": [1.0, loss], "processed": tokens}])

    assert same_work(arm(2.0, 9), arm(2.0, 9)).startswith("same work")
    assert "NOT THE SAME WORK" in same_work(arm(2.0, 9), arm(2.1, 9))
    assert "NOT THE SAME WORK, 9 and 8 tokens" in same_work(arm(2.0, 9), arm(2.0, 8))


def about(**changes):
    base = {"hardware": "H", "versions": "V", "peer": "P", "threads": "2", "load": "0.1"}
    return base | {"commit": "abc", "command": "python x.py --a 'b c'"} | changes


def rows_from(tmp_path, rows, **changes):
    file = tmp_path / "rows.json"
    save_rows(rows, about(**changes), file)
    return [Row(**row) for row in json.loads(file.read_text())]


def test_rows_enter_results_and_replace_their_older_selves(tmp_path):
    text = merge(EMPTY, rows_from(tmp_path, [Row("a", "1", "2", "0.5x"), Row("b", "3", "4")]))
    assert [row[:4] for row in read_table(text)] == [("a", "1", "2", "0.5x"), ("b", "3", "4", "")]
    assert read_machines(text) == {"M1": "H; V; P; threads: 2; load 0.1 before"}
    newer = rows_from(tmp_path, [Row("a", "9", "2", "4.5x")], hardware="GPU", commit="def")
    text = merge(text, newer)
    a, b = read_table(text)
    assert (a.ours, a.machine, a.commit) == ("9", "M2", "def")
    assert (b.machine, b.commit, b.command) == ("M1", "abc", "`python x.py --a 'b c'`")
    text = merge(text, rows_from(tmp_path, [Row("b", "5", "4")], hardware="GPU"))
    assert set(read_machines(text)) == {"M2"}  # the other one has no row any more
    assert text.startswith("# Results\n\ntext\n") and text.endswith(f"{END}\nmore\n")


def test_the_readme_table_shows_main_figures_with_their_machine(tmp_path):
    rows = [Row("SFT: peak RSS", "9", "3", "3x"), Row("SFT: first loss", "1", "1")]
    table = readme_table(merge(EMPTY, rows_from(tmp_path, rows)))
    assert "| SFT: peak RSS | 9 | 3 | 3x |" in table and "H; V; P" in table
    assert "first loss" not in table
    readme = update_readme(f"a\n{START}\nold\n{END}\nb\n", EMPTY)
    assert readme == f"a\n{START}\nNo figures yet.\n{END}\nb\n"


def test_the_readme_is_in_step_with_results():
    readme, results = README.read_text(encoding="utf-8"), RESULTS.read_text(encoding="utf-8")
    assert update_readme(readme, results) == readme, "run python benchmarks/results.py"
    for row in read_table(results):
        assert row.machine in read_machines(results) and row.commit and row.command
    assert str(ROOT) not in results
