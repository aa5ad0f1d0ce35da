"""What the progress display says, on a terminal and off it, with a clock of our own."""

import io

from lean_trl.train.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(stream: io.StringIO) -> list[str]:
    """States of the display: the bar redraws after a carriage return."""
    return [
        line.strip() for line in stream.getvalue().replace("\r", "\n").splitlines() if line.strip()
    ]


def test_without_a_terminal_a_line_every_ten_seconds_and_the_last_step():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(30, stream=stream, clock=clock)
    for step in range(1, 31):
        clock.now += 1.0
        progress.update(step, loss=3.0 / step, tokens_per_second=1234.5)
    progress.close()
    assert shown(stream) == [
        "step 1/30  loss 3.0000  1.234k tokens/s  ETA ?",
        "step 11/30  loss 0.2727  1.234k tokens/s  ETA 19s",
        "step 21/30  loss 0.1429  1.234k tokens/s  ETA 9s",
        "step 30/30  loss 0.1000  1.234k tokens/s  ETA 0s",
    ]


def test_a_run_that_ends_early_still_shows_its_last_step_once():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(None, stream=stream, clock=clock)
    for step in (1, 2, 3):
        progress.update(step, loss=1.0, tokens_per_second=10)
    progress.close()
    progress.close()
    assert [line.split("  ")[0] for line in shown(stream)] == ["step 1/?", "step 3/?"]


def test_time_left_ignores_what_came_before_the_first_step_and_that_steps_come_in_bursts():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(40, stream=stream, clock=clock)
    clock.now += 500.0  # loading and the first evaluation
    for burst in range(2):  # ten steps of two seconds, read back together
        for step in range(1, 11):
            progress.update(10 * burst + step, loss=1.0, tokens_per_second=10)
        clock.now += 20.0
    progress.close()
    assert shown(stream)[-1].startswith("step 20/40")
    assert shown(stream)[-1].endswith("ETA 40s")


def test_on_a_terminal_one_bar_with_the_numbers():
    stream, clock = Terminal(), Clock()
    progress = Progress(2, stream=stream, clock=clock)
    progress.update(1, loss=2.5, tokens_per_second=800)
    clock.now += 3.0
    progress.update(2, loss=1.25, tokens_per_second=800)
    progress.close()
    last = shown(stream)[-1]
    assert "step 2/2  loss 1.2500  800 tokens/s  ETA 0s" in last
    assert stream.getvalue().count("\n") == 1  # redrawn in place


def test_a_message_does_not_tear_the_bar(capsys):
    stream = Terminal()
    progress = Progress(5, stream=stream, clock=Clock())
    progress.say("before")
    progress.update(1, loss=1.0, tokens_per_second=1)
    progress.say("step 1: eval_loss 2.0")
    progress.close()
    assert capsys.readouterr().out.split("\n")[:2] == ["before", "step 1: eval_loss 2.0"]
    assert "eval_loss" not in stream.getvalue()


def test_disabled_shows_nothing():
    stream = Terminal()
    progress = Progress(3, enabled=False, stream=stream)
    progress.update(1, loss=1.0, tokens_per_second=1)
    progress.close()
    assert stream.getvalue() == ""
