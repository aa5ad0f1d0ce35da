"""The feed of online methods: windows, masks, denominators, resumption; no real engine."""

import json
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from lean_trl.config import Config, config_from_dict
from lean_trl.data.tokenizer import load_tokenizer
from lean_trl.recipe import SettingsError
from lean_trl.rollout.arithmetic import make_arithmetic
from lean_trl.rollout.buffer import from_text, to_text
from lean_trl.rollout.feed import RolloutFeed, open_rollouts
from lean_trl.train.distributed import World
from lean_trl.train.methods import METHODS
from lean_trl.train.step import train_step
from tests.ranks import on_ranks
from tests.rollout.fakes import RecordingEngine
from tests.train.golden import GOLDEN
from tests.train.stubs import Table

ALONE = World(0, 1, torch.device("cpu"), None)
STOP = 2


def reward_by_length(completion_ids, **columns):
    """None for completions that begin with 13."""
    return [None if ids[:1] == [13] else float(len(ids)) for ids in completion_ids]


def settings(tmp_path, method="grpo", **sections) -> Config:
    rows = tmp_path / "rows.jsonl"
    if not rows.exists():
        ids = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16]]
        rows.write_text("".join(json.dumps({"prompt_ids": i, "gold": "x"}) + "\n" for i in ids))
    tree = {
        "method": method,
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(GOLDEN / "tokenizer")},
        "data": {"path": str(rows), "shuffle": False, "cache_dir": str(tmp_path / "cache")},
        "rollout": {
            "num_generations": 2,
            "max_completion_length": 4,
            "reward_funcs": "tests.rollout.test_feed.reward_by_length",
            "stop_token_ids": [STOP],
        },
        "train": {"batch_size": 4, "micro_batch_size": 3, "max_steps": 6},
    }
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return config_from_dict(tree)


def said(*scripts):
    """Completions in turn: a list of ids, or the fields of a Completion."""
    turn = iter(scripts * 50)

    def script(request, index):
        ids = next(turn)
        return dict(ids) if isinstance(ids, dict) else {"ids": tuple(ids)}

    return script


def feed_of(config, script, model=None, world=ALONE) -> RolloutFeed:
    tokenizer = load_tokenizer(GOLDEN / "tokenizer")
    feed, _ = open_rollouts(config, tokenizer, world)
    feed.engine = RecordingEngine(script)
    feed.connect(model or Table(torch.linspace(-3, -1, 64)), None)
    return feed


SCRIPT = said([20, STOP], [21, 22, 23, 24], [25, STOP], [26, 27, STOP])


def test_windows_totals_and_what_the_engine_was_asked(tmp_path):
    feed = feed_of(settings(tmp_path), SCRIPT)
    windows = list(feed)
    assert len(windows) == feed.steps == 6
    first = windows[0]
    assert [batch.num_sequences for batch in first.batches] == [3, 1]
    assert first.totals["tokens"] == 11 and first.totals["sequences"] == 4
    assert first.totals["processed"] == 11 + 2 * 3 + 2 * 2 and first.totals["groups"] == 2
    batch = first.batches[0]
    assert batch.input_ids.tolist() == [5, 6, 7, 20, 2, 5, 6, 7, 21, 22, 23, 24, 8, 9, 25, 2]
    assert batch.targets.tolist() == [20, 2, 21, 22, 23, 24, 25, 2]
    assert batch.extras["advantages"].tolist()[:2] == pytest.approx([-0.7070, 0.7070], abs=1e-4)
    assert (batch.temperature, batch.max_completion_length) == (1.0, 4)
    requests = feed.engine.requests
    # An epoch of 5 prompts ends with a generation of one; then the rows come again.
    assert [r.prompt_ids[0] for r in requests] == [5, 8, 10, 14, 15, 5, 8, 10, 14, 15]
    assert windows[2].totals["sequences"] == 2 and windows[2].epoch == 1
    assert len({r.seed for r in requests}) == 10
    assert requests[0].stop_ids == {STOP} and requests[0].max_tokens == 4
    assert feed.engine.calls[:8] == ["wake", "sync 0", "submit", "sleep"] + [
        *("wake", "sync 1", "submit", "sleep")
    ]


def test_metrics_of_a_generation(tmp_path):
    script = said([20, STOP], [21, 22, 23, 24], [13, STOP], [26, 27, STOP])
    window = next(iter(feed_of(settings(tmp_path), script)))
    metrics = window.metrics
    assert metrics["completions/mean_length"] == 11 / 4
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["completions/mean_terminated_length"] == pytest.approx(7 / 3)
    assert metrics["reward"] == 3 and metrics["reward_std"] == pytest.approx(1.0)
    assert metrics["rewards/reward_by_length/abstained"] == 1
    # The other one of that group is alone: its reward deviates from nothing.
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["completions/learnt_ratio"] == 0.75


def step(feed, loss, window=None):
    """(loss, gradient) of the next window with the Table's weights."""
    window = window or next(iter(feed))
    model = feed._model
    method = METHODS[feed.config.method].bind(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    grads = []
    optimizer.register_step_pre_hook(lambda *_: grads.append(model.logprobs.grad.clone()))
    report = train_step(
        model, window.batches, method, optimizer, totals=window.totals, max_grad_norm=None
    )
    return report.loss.item(), grads[0] if grads else None


class WithEntropy(Table):
    def forward(self, batch, want=()):
        scores = super().forward(batch, want)
        return replace(scores, entropy=-scores.logprobs)


def with_entropy():
    return WithEntropy(torch.linspace(-3, -1, 64))


@pytest.mark.parametrize(
    "loss_type, rest",
    # Completions of 2, 4, 2, 3 tokens; advantages -a, a, -b, b; the second is cut off.
    [
        ("dapo", lambda a, b: (2 * a + 2 * b - 3 * b) / 7),
        ("grpo", lambda a, b: (a + b - b) / 4),
        ("dr_grpo", lambda a, b: (2 * a + 2 * b - 3 * b) / (4 * 4)),
    ],
)
def test_cut_off_completions_teach_nothing_but_count(loss_type, rest, tmp_path):
    """They are in the baseline of their group and among completions, never among tokens."""
    config = settings(tmp_path, loss={"loss_type": loss_type, "mask_truncated_completions": True})
    feed = feed_of(config, SCRIPT, with_entropy())
    window = next(iter(feed))
    assert window.totals["tokens"] == 7 and window.totals["sequences"] == 4
    assert sum(batch.num_sequences for batch in window.batches) == 3  # it is not forwarded
    a, b = 1 / (math.sqrt(2) + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4)
    loss, _ = step(feed, config.loss, window)
    assert loss == pytest.approx(rest(a, b), abs=1e-5)


def test_abstained_and_empty_completions(tmp_path):
    script = said([13, 20, STOP], [21, STOP], [], [26, 27, STOP])
    window = next(iter(feed_of(settings(tmp_path), script)))
    assert window.totals["sequences"] == 4
    assert window.totals["tokens"] == 2 + 3
    sources = [batch.targets.tolist() for batch in window.batches]
    assert sources == [[21, 2, 26, 27, 2]]
    # An empty completion has a reward, 0: it is the baseline of the other one.
    assert window.batches[0].extras["advantages"].tolist() == pytest.approx(
        [0, 1.5 / (3 / math.sqrt(2) + 1e-4)], abs=1e-5
    )


def test_nothing_to_learn_changes_no_weight(tmp_path):
    config = settings(tmp_path)
    feed = feed_of(config, said([13, STOP]), with_entropy())
    before = feed._model.logprobs.clone()
    loss, grad = step(feed, config.loss)
    assert loss == 0 and grad is None
    assert torch.equal(before, feed._model.logprobs)


def test_tokens_in_tokens_out_and_tool_tokens(tmp_path):
    """Ids 45, 46 decode to what one id encodes to; a tool's tokens are seen, not learnt."""
    spoken = {
        "ids": (45, 46, 30, 31, 8, STOP),
        "scored": (True, True, False, False, True, True),
        "logprobs": (-1.0, -1.0, 0.0, 0.0, -1.0, -1.0),
    }
    config = settings(tmp_path, rollout={"max_completion_length": 6})
    window = next(iter(feed_of(config, said(spoken, [20, STOP]))))
    batch = window.batches[0]
    first = batch.input_ids[: batch.lengths[0]].tolist()
    assert first == [5, 6, 7, 45, 46, 30, 31, 8, STOP]
    assert batch.targets[: batch.units[0]].tolist() == [45, 46, 8, STOP]
    assert batch.rows[: batch.units[0]].tolist() == [2, 3, 6, 7]
    with pytest.raises(ValueError, match="5 logprobs for 6 ids"):
        bad = {**spoken, "logprobs": (-1.0,) * 5}
        next(iter(feed_of(config, said(bad))))


def test_the_same_loss_however_the_window_is_cut(tmp_path):
    losses, grads = [], []
    for size in (1, 2, 3, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        config = settings(
            folder,
            loss={"loss_type": "grpo", "top_entropy_quantile": 0.5, "entropy_coef": 0.1},
            train={"micro_batch_size": size},
        )
        loss, grad = step(feed_of(config, SCRIPT, with_entropy()), config.loss)
        losses.append(loss)
        grads.append(grad)
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-6)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])


def test_top_entropy_by_hand(tmp_path):
    """Entropies are minus the log-probs: the quarter of the tokens with the lowest ids stay."""
    config = settings(tmp_path, loss={"top_entropy_quantile": 0.25})
    _, grad = step(feed_of(config, SCRIPT, with_entropy()), config.loss)
    assert set(grad.nonzero().flatten().tolist()) == {STOP}  # 3 of 11, all equal


def test_generations_of_several_windows_learnt_from_twice(tmp_path):
    config = settings(
        tmp_path,
        train={"batch_size": 2, "micro_batch_size": 2, "max_steps": 12},
        rollout={"steps_per_generation": 2, "num_iterations": 2},
    )
    feed = feed_of(config, SCRIPT)
    windows = list(feed)
    assert [r.prompt_ids[0] for r in feed.engine.requests] == [5, 8, 10, 14, 15, 5, 8]
    firsts = [int(window.batches[0].input_ids[0]) for window in windows]
    assert firsts == [5, 8, 5, 8, 10, 14, 10, 14, 15, 15, 5, 8]
    assert [bool(window.metrics) for window in windows] == [
        *(True, False, False, False),
        *(True, False, False, False),
        *(True, False, True, False),
    ]
    old = [window.batches[0].extras["old_logprobs"] for window in windows]
    assert torch.equal(old[0], old[2])
    assert old[0].tolist() == pytest.approx(
        feed._model.logprobs[windows[0].batches[0].targets].tolist()
    )


def test_resuming_in_the_middle_of_a_generation(tmp_path):
    config = settings(
        tmp_path,
        train={"batch_size": 2, "micro_batch_size": 2, "max_steps": 9},
        rollout={"steps_per_generation": 2, "num_iterations": 2},
    )

    def script(request, index):
        return {"ids": (20 + request.seed % 30, 3 + index, STOP), "logprobs": (-1.0, -2.0, -0.5)}

    whole = list(feed_of(config, script))
    for stop in range(1, 9):
        feed = feed_of(config, script)
        rows = iter(feed)
        for _ in range(stop):
            next(rows)
        state = json.loads(json.dumps(feed.state_dict()))
        resumed = feed_of(config, script)
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert len(rest) == 9 - stop
        for ours, theirs in zip(rest, whole[stop:], strict=True):
            assert (ours.totals, ours.epoch) == (theirs.totals, theirs.epoch)
            for a, b in zip(ours.batches, theirs.batches, strict=True):
                assert torch.equal(a.input_ids, b.input_ids)
                for name in b.extras:
                    assert torch.equal(a.extras[name], b.extras[name]), name


def test_other_prompts_are_refused_on_resumption(tmp_path):
    feed = feed_of(settings(tmp_path), SCRIPT)
    state = {**feed.state_dict(), "prompts": [4, 12]}
    with pytest.raises(ValueError, match="the prompts have changed"):
        feed.load_state_dict(state)


def test_the_adaptive_entropy_controller(tmp_path):
    config = settings(
        tmp_path,
        loss={
            **{"use_adaptive_entropy": True, "entropy_target": 2.6, "entropy_coef": 0.5},
            **{"entropy_coef_delta": 0.1, "entropy_coef_max": 0.55},
        },
    )
    feed = feed_of(config, SCRIPT, with_entropy())

    class Report:
        def __init__(self, entropy):
            self.metrics = {"entropy": torch.tensor(entropy)}

    coefs = []
    rows = iter(feed)
    for entropy in (2.5, 2.5, 2.7, 2.6, 2.5):
        coefs.append(next(rows).batches[0].extras["entropy_coef"].item())
        feed.after_step(Report(entropy))
    # Not in the first window; up to the maximum; off and down above the target; on again at it.
    assert coefs == pytest.approx([0, 0.55, 0.55, 0, 0.35])
    resumed = feed_of(config, SCRIPT, with_entropy())
    resumed.load_state_dict(json.loads(json.dumps(feed.state_dict())))
    assert resumed.entropy.state_dict() == feed.entropy.state_dict()


def test_importance_correction_and_off_policy_mask(tmp_path):
    table = with_entropy()
    spoken = []
    for ids in ([20, STOP], [21, 22, 23, 24], [25, STOP], [26, 27, STOP]):
        true = table.logprobs[torch.tensor(ids)].tolist()
        gap = 0.5 if ids[0] == 21 else 0.0
        spoken.append({"ids": tuple(ids), "logprobs": tuple(x - gap for x in true)})
    config = settings(
        tmp_path, loss={"importance_correction": {"mode": "token_truncate", "clip_max": 1.2}}
    )
    feed = feed_of(config, said(*spoken), table)
    window = next(iter(feed))
    weights = window.batches[0].extras["importance_weights"].tolist()
    assert weights == pytest.approx([1, 1] + [1.2] * 4 + [1, 1], abs=1e-5)
    metrics = window.metrics
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(1.2)
    loss, _ = step(feed, config.loss, window)
    a, b = 1 / (math.sqrt(2) + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4)
    assert loss == pytest.approx((2 * a - 4 * 1.2 * a + 2 * b - 3 * b) / 11, abs=1e-5)


def test_online_dpo_pairs(tmp_path):
    """The longer one is better; a tie goes to the first; one that abstained cannot be compared."""
    script = said([20, STOP], [21, 22, STOP], [23, STOP], [24, STOP], [13, STOP], [25, STOP])
    config = settings(
        tmp_path, "online_dpo", train={"batch_size": 6, "micro_batch_size": 2, "max_steps": 1}
    )
    feed = feed_of(config, script)
    window = next(iter(feed))
    assert window.totals["pairs"] == 2 and window.metrics["pairs_not_compared"] == 1
    assert [batch.num_pairs for batch in window.batches] == [1, 1]
    chosen = [batch.targets[: batch.units[0]].tolist() for batch in window.batches]
    assert chosen == [[21, 22, STOP], [23, STOP]]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_the_same_generation(size, tmp_path):
    """Each prompt is answered on one rank; every rank plans all windows."""
    config = settings(
        tmp_path,
        train={"batch_size": 8, "micro_batch_size": 2, "max_steps": 2},
        rollout={"num_iterations": 2},  # so that the buffer outlives its first window
    )

    def script(request, index):
        return {"ids": (request.prompt_ids[0], 20 + index, STOP), "logprobs": (-1.0, -2.0, -3.0)}

    alone = feed_of(config, script)
    next(iter(alone))

    def work(world):
        feed = feed_of(config, script, world=world)
        window = next(iter(feed))
        asked = [request.prompt_ids[0] for request in feed.engine.requests]
        mine = sum(batch.num_sequences for batch in window.batches)
        return to_text(feed._rollouts), asked, mine, len(window.batches), window.metrics

    results = on_ranks(size, work)
    assert [r[0] for r in results] == [to_text(alone._rollouts)] * size
    assert sorted(p for r in results for p in r[1]) == [5, 8, 10, 14]
    assert sum(r[2] for r in results) == 8 and len({r[3] for r in results}) == 1
    assert all(r[4] == results[0][4] for r in results)


def test_the_buffer_keeps_every_bit(tmp_path):
    feed = feed_of(settings(tmp_path, rollout={"num_iterations": 2}), SCRIPT)
    next(iter(feed))
    again = from_text(to_text(feed._rollouts))
    for a, b in zip(again, feed._rollouts, strict=True):
        assert np.array_equal(a.completion_ids, b.completion_ids)
        assert (a.group, a.reward, a.advantage, a.truncated) == (
            *(b.group, b.reward, b.advantage, b.truncated),
        )
        assert np.array_equal(a.extras["old_logprobs"], b.extras["old_logprobs"])


@pytest.mark.parametrize(
    "sections, numbers",
    [
        ({"train": {"batch_size": 1, "micro_batch_size": 1}}, 8),
        ({"train": {"batch_size": 12, "micro_batch_size": 1}}, 16),
        ({"train": {"batch_size": 9, "micro_batch_size": 1}}, 16),
    ],
)
def test_groups_that_do_not_fit_and_what_is_proposed(sections, numbers, tmp_path):
    config = settings(tmp_path, rollout={"num_generations": 8}, **sections)
    with pytest.raises(SettingsError) as raised:
        make_arithmetic(config, 1)
    message = str(raised.value)
    assert f"train.batch_size to {numbers}" in message
    # What is proposed works, both ways.
    proposed = settings(tmp_path, rollout={"num_generations": 8}, train={"batch_size": numbers})
    assert make_arithmetic(proposed, 1).prompts == numbers // 8
    if "num_generations to" in message:
        other = int(message.rsplit("num_generations to ", 1)[1])
        fits = settings(tmp_path, rollout={"num_generations": other}, **sections)
        assert make_arithmetic(fits, 1).generation % other == 0


def test_a_generation_is_whole_steps(tmp_path):
    config = settings(
        tmp_path,
        train={"batch_size": 4, "micro_batch_size": 2},
        rollout={"steps_per_generation": 3},
    )
    with pytest.raises(SettingsError, match="set rollout.steps_per_generation to 4"):
        make_arithmetic(config, 1)


def test_long_prompts_are_dropped_and_counted(tmp_path):
    config = settings(tmp_path, data={"max_prompt_length": 2})
    tokenizer = load_tokenizer(GOLDEN / "tokenizer")
    feed, report = open_rollouts(config, tokenizer, ALONE)
    assert "2 of 5 rows dropped: prompt over data.max_prompt_length 2" in report
    assert [len(prompt.ids) for prompt in feed.prompts.generation(0)] == [2, 1]
    with pytest.raises(ValueError, match="no prompt is left"):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt_ids": [1, 2, 3]}))
        open_rollouts(config, tokenizer, ALONE)


def test_a_slow_reward_abstains(tmp_path, capsys):
    config = settings(
        tmp_path,
        rollout={
            "reward_funcs": ["tests.rollout.test_feed.sleeps", "think_format"],
            "reward_timeout_s": 0.2,
        },
    )
    feed = feed_of(config, SCRIPT)
    start = time.monotonic()
    window = next(iter(feed))
    assert time.monotonic() - start < 5
    assert window.metrics["rewards/sleeps/abstained"] == 4
    assert window.totals["tokens"] == 11  # the other function decides
    assert "sleeps took more than 0.2 s" in capsys.readouterr().out


def sleeps(completion_ids, **columns):
    threading.Event().wait(10)
    return [1.0] * len(completion_ids)
