"""Completions on disk: what a log holds is what a replay gives; what can be wrong with a file."""

import json

import pytest

from lean_trl.rollout.engine import Completion, Request, generate
from lean_trl.rollout.replay import CompletionLog, ReplayEngine


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def line(prompt, said, **more):
    return {"prompt": "p", "prompt_ids": prompt, "completion_ids": said, **more}


def test_lines_in_their_order_and_what_they_bring(tmp_path):
    third = 1 / 3
    file = write(
        tmp_path / "c.jsonl",
        line(
            [1], [5, 2], logprobs=[-third, -1e-7], finish_reason="stop", versions=[[0, 3]], gold=7
        ),
        line([9], [6]),
        line([1], [7, 8, 9], finish_reason="stop", scored=[True, False, True]),
        line([1], []),
    )
    engine = ReplayEngine(file)
    first, second = generate(engine, [Request(4, (1,), n=2, max_tokens=2)])
    assert first == Completion(4, 0, (5, 2), (-third, -1e-7), "stop", ((0, 3),), None, {"gold": 7})
    # Over max_tokens it is cut, and says so.
    assert (second.ids, second.finish_reason, second.scored) == ((7, 8), "length", (True, False))
    assert generate(engine, [Request(5, (1,))])[0].ids == ()
    with pytest.raises(
        ValueError, match=r"cannot give 1 completions of prompt \[1\].*only 0 left|not"
    ):
        engine.submit([Request(6, (1,))])
    with pytest.raises(ValueError, match="the prompt is not in the file"):
        engine.submit([Request(7, (3, 4))])


def test_skipping_what_a_resumed_run_has_taken(tmp_path):
    file = write(tmp_path / "c.jsonl", *(line([1], [i]) for i in range(5)))
    engine = ReplayEngine(file)
    engine.skip([((1,), 2), ((1,), 1)])
    assert [c.ids for c in generate(engine, [Request(0, (1,), n=2)])] == [(3,), (4,)]


@pytest.mark.parametrize(
    "row, answer",
    [
        ({"prompt": "a"}, "row 0: a replay needs prompt_ids and completion_ids, got prompt"),
        (line([1], [5, 2], logprobs=[-1.0]), "2 completion_ids but 1 logprobs"),
        (line([1], [5, 2], scored=[True]), "2 completion_ids but 1 scored"),
    ],
)
def test_broken_files(row, answer, tmp_path):
    with pytest.raises(ValueError, match=answer):
        ReplayEngine(write(tmp_path / "c.jsonl", row)).submit([Request(0, (1,))])


def test_an_empty_file(tmp_path):
    with pytest.raises(ValueError, match="holds no completions"):
        ReplayEngine(write(tmp_path / "c.jsonl"))


def test_truncated_with_and_without_a_reason():
    def said(ids, reason=None):
        return Completion(0, 0, ids, finish_reason=reason).truncated([2])

    assert [said((5, 2)), said((5,)), said(())] == [False, True, True]
    assert [said((5,), "stop"), said((5, 2), "length")] == [False, True]


def test_a_log_goes_on_where_the_checkpoint_was(tmp_path):
    path = tmp_path / "out" / "c.jsonl"
    log = CompletionLog(path)
    for step in range(4):
        log.write([line([1], [step], step=step)] * 2)
    log.close()
    with path.open("a") as file:
        file.write('{"step": 1, "cut o')
    again = CompletionLog(path, step=2)
    again.write([line([1], [9], step=2)])
    again.close()
    steps = [json.loads(text)["step"] for text in path.read_text().splitlines()]
    assert steps == [0, 0, 1, 1, 2]
    assert [c.ids for c in generate(ReplayEngine(path), [Request(0, (1,), n=5)])][-1] == (9,)


def test_an_engine_that_forgets_a_completion():
    class Forgetful(ReplayEngine):
        def __init__(self):
            self._ready = []

        def submit(self, requests):
            pass

    with pytest.raises(RuntimeError, match="2 completions are missing, the first of request 3"):
        generate(Forgetful(), [Request(3, (1,), n=2)])
