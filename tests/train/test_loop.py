"""The edges of a run: what an evaluation leaves alone, what is refused before the first step."""

from dataclasses import replace

import pytest

from lean_trl.train.loop import train_as

from .test_resume import ONE, settings


def files(folder):
    """{path: bytes}, without what an evaluation adds."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "metrics.jsonl"
    }


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_an_evaluation_leaves_the_run_as_it_was_and_adds_a_line(resume, tmp_path):
    config = settings(tmp_path, train={"max_steps": 2})
    train_as(ONE, config)
    out = tmp_path / "out"
    before, lines = files(out), (out / "metrics.jsonl").read_text()
    evaluation = replace(
        config,
        eval_only=True,
        data=replace(config.data, eval_path=config.data.path),
        checkpoint=replace(config.checkpoint, resume=resume),
    )
    train_as(ONE, evaluation)
    after = (out / "metrics.jsonl").read_text()
    assert files(out) == before
    assert after.startswith(lines) and "eval_loss" in after.removeprefix(lines)


@pytest.mark.parametrize("beyond", ["", "/deeper"])
def test_an_output_dir_that_is_a_file(beyond, tmp_path):
    (tmp_path / "file").write_text("mine")
    config = replace(settings(tmp_path), output_dir=str(tmp_path / "file") + beyond)
    with pytest.raises(ValueError, match=r"output_dir '.*' cannot be made \(.*\): set another one"):
        train_as(ONE, config)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_warm_up_longer_than_the_epochs_is_refused(tmp_path):
    config = settings(tmp_path, train={"warmup_steps": 11})  # 20 rows, 4 a step, 2 epochs
    with pytest.raises(ValueError, match="warmup_steps 11 is more than the 10 steps of the run"):
        train_as(ONE, config)
