"""A rank that raises, dies or hangs: the others end in time and say which it was."""

import os
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lean_trl.train.distributed import World, join_world
from lean_trl.train.watchdog import Place, Watchdog
from tests.processes import on_processes

SILENCE_S = 4.0  # 15 in a run


def test_a_place_in_words():
    place = Place()
    assert str(place) == "the start"
    place.step, place.reading = 2, lambda: [("a.jsonl", 7)]
    assert str(place) == "step 2, a.jsonl row 7"
    batches: list[Any] = [
        SimpleNamespace(sources=(("b", 0), ("b", 1))),
        SimpleNamespace(sources=[("c", n) for n in range(6)]),
    ]
    around = place.follow(batches, nullcontext)
    assert str(place) == "step 2, b row 0, b row 1, c row 0, c row 1, 4 more"
    with around():
        assert str(place) == "step 2, b row 0, b row 1"
    with around():
        assert str(place) == "step 2, c row 0, c row 1, c row 2, c row 3, 2 more"


def test_one_rank_needs_no_watching():
    with Watchdog(World(0, 1, torch.device("cpu"), None)):
        assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def steps(fail: dict, timeout_s: float = 60.0, last: int = 4) -> None:
    """Four steps of one all-reduce each; rank and step of `fail` do something else."""
    with join_world(timeout_s) as world, Watchdog(world, timeout_s, SILENCE_S) as watchdog:
        place = watchdog.place
        for place.step in range(1, last + 1):
            place.rows = [("rows.jsonl", 10 * place.step + world.rank)]
            if (world.rank, place.step) in fail:
                fail[world.rank, place.step]()
            dist.all_reduce(torch.ones(1))


def boom() -> None:
    raise KeyError("no such column")


def test_all_leave_together(tmp_path):
    slow = {(2, 4): lambda: time.sleep(3)}
    ends = on_processes(3, lambda: steps(slow), tmp_path)
    assert [end.code for end in ends] == [0, 0, 0], [end.stderr for end in ends]


def test_a_rank_that_raises(tmp_path):
    ends = on_processes(3, lambda: steps({(1, 2): boom}), tmp_path)
    assert [end.code for end in ends] == [1, 3, 1]
    assert max(end.seconds for end in ends) < 15
    told = "rank 1 failed at step 2, rows.jsonl row 21: KeyError: 'no such column'"
    for rank in (0, 2):
        assert (
            f"rank {rank} ends at step 2, rows.jsonl row {20 + rank}: {told}" in ends[rank].stderr
        )
    assert "KeyError: 'no such column'" in ends[1].stderr


def test_a_rank_that_is_killed(tmp_path):

    def die() -> None:
        time.sleep(2.5)  # its last sign of life tells the step
        os.kill(os.getpid(), signal.SIGKILL)

    ends = on_processes(3, lambda: steps({(1, 3): die}), tmp_path)
    assert ends[1].code == -signal.SIGKILL
    for rank in (0, 2):
        assert ends[rank].code in (1, 3) and ends[rank].seconds < 20
        assert "rank 1 failed at step 3, rows.jsonl row 31: no sign of life" in ends[rank].stderr


def test_the_rank_that_holds_the_store_is_killed(tmp_path):
    ends = on_processes(2, lambda: steps({(0, 2): lambda: os.kill(os.getpid(), 9)}), tmp_path)
    assert ends[0].code == -signal.SIGKILL
    assert ends[1].code in (1, 3) and ends[1].seconds < 20


def test_a_rank_that_hangs(tmp_path):
    hang = {(1, 2): lambda: time.sleep(100)}
    ends = on_processes(2, lambda: steps(hang, timeout_s=3.0), tmp_path)
    assert all(end.code in (1, 3) and end.seconds < 30 for end in ends)
    assert "rank 1 ends at step 2, rows.jsonl row 21: rank 0 failed at step 2" in ends[1].stderr
    assert "Timed out" in ends[1].stderr
    assert "rank 1 was at step 2, rows.jsonl row 21" in ends[1].stderr


def test_the_cause_is_told_to_ranks_that_do_something_else(tmp_path):
    """Rank 0 is in no collective but reads data, for longer than a run may take to end."""
    busy = {(0, 2): lambda: time.sleep(50), (1, 2): boom}
    ends = on_processes(2, lambda: steps(busy), tmp_path)
    assert [end.code for end in ends] == [1, 3]
    assert ends[0].seconds < 15 and "rank 1 failed at step 2" in ends[0].stderr
