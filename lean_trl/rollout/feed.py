"""Windows of completions instead of rows: the feed of online methods.

    feed, report = open_rollouts(config, tokenizer, world)     # everything that fails cheaply
    feed.connect(model, reference)
    for window in feed: ...                                    # generates when it has to

One generation: prompts -> engine -> rewards (in threads) beside old and reference log-probs ->
advantages -> windows. Completions that are not learnt from (cut off, or without a reward) are not
forwarded, but stay in the baselines of their group and in the denominators that count completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from lean_trl.config import Config
from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.data.plan import Cut, Window
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.model.decoder import CausalLM
from lean_trl.rollout.advantages import finish_rewards
from lean_trl.rollout.arithmetic import Arithmetic, make_arithmetic
from lean_trl.rollout.buffer import (
    Rollout,
    exchange,
    from_text,
    make_rollout,
    to_text,
    with_values,
)
from lean_trl.rollout.engine import Completion, Engine, Request, Sampling, generate
from lean_trl.rollout.entropy import EntropyController
from lean_trl.rollout.gather import open_native
from lean_trl.rollout.judges import Judges, open_judges
from lean_trl.rollout.prompts import Prompt, Prompts, open_prompts
from lean_trl.rollout.replay import CompletionLog, ReplayEngine
from lean_trl.rollout.report import generation_metrics, pair_metrics
from lean_trl.rollout.scoring import cut_rollouts, score_rollouts
from lean_trl.rollout.tasks import open_task
from lean_trl.train.distributed import World
from lean_trl.types import Batch, StepReport


class RolloutFeed:
    """Windows of one rank, in order; continues where load_state_dict says."""

    def __init__(
        self,
        config: Config,
        prompts: Prompts,
        arithmetic: Arithmetic,
        judges: Judges,
        tokenizer: Tokenizer,
        world: World,
        engine: Engine | None,
    ) -> None:
        self.config, self.prompts, self.arithmetic = config, prompts, arithmetic
        self.judges, self.tokenizer, self.world, self.engine = judges, tokenizer, world, engine
        self.entropy = EntropyController(config.loss)
        train, data = config.train, config.data
        size = train.micro_batch_size
        if config.method == "online_dpo":  # items are pairs
            size = max(size // 2, 1)
        self._cut = Cut(size, train.max_tokens_per_micro_batch, world.size)
        self._layout: dict[str, Any] = {
            "padding_free": data.padding_free,
            "pad_to_multiple_of": data.pad_to_multiple_of,
        }
        stops = config.rollout.stop_token_ids
        self.stop_ids = frozenset(tokenizer.stop_ids if stops is None else stops)
        self._model: nn.Module | None = None
        self._reference: nn.Module | None = None
        self._log: CompletionLog | None = None
        self._rollouts: list[Rollout] = []  # of the generation that is being learnt from
        self._generation = 0  # the next one
        self._window = 0  # of the current generation, the next one
        self._done = 0  # windows handed out
        self._reading: Sequence[Prompt] = ()

    @property
    def steps(self) -> int:
        """Windows of the whole run, known before the first."""
        return self.prompts.steps

    def connect(self, model: CausalLM, reference: nn.Module | None) -> None:
        """Hand over the policy, and the frozen reference when the method needs one."""
        self._model, self._reference = model, reference
        if self.engine is None:
            self.engine = open_native(model, self.config, self.world)

    def __iter__(self) -> Iterator[Window]:
        while self._done < self.steps:
            metrics: Mapping[str, float] = {}
            if not self._rollouts:
                metrics = self._generate()
            yield self._next_window(metrics)

    def reading(self) -> list[tuple[str, int]]:
        """(file, row) of the prompts that are being answered."""
        return [prompt.source for prompt in self._reading]

    def after_step(self, report: StepReport) -> None:
        """What a step tells the next ones."""
        self.entropy.observe(report)

    # -- one generation --

    def _generate(self) -> dict[str, float]:
        """Fill the buffer; returns the generation's metrics."""
        assert self._model is not None and self.engine is not None, "connect() comes first"
        number, world, rollout = self._generation, self.world, self.config.rollout
        asked = self.prompts.generation(number)
        mine = range(world.rank, len(asked), world.size)
        self._reading = [asked[p] for p in mine]
        completions = self._run_engine([self._request(number, p, asked[p]) for p in mine])
        own = []
        for completion in completions:
            prompt = asked[completion.request_id]
            own.append(
                make_rollout(
                    completion, completion.request_id, prompt.item, prompt.ids, self.stop_ids
                )
            )
        if self.config.loss.mask_truncated_completions:
            own = [replace(r, masked=r.masked or r.truncated) for r in own]
        verdicts = self.judges.start(own, [asked[r.group] for r in own], completions)
        rollouts = self._with_logprobs(exchange(own, world.group))
        rewards, problems = verdicts.gather(world.group)
        for problem in problems:
            print(f"rank {world.rank}, step {self._done}: {problem}", flush=True)
        rollouts = finish_rewards(
            rollouts, rewards, self.judges.weights, self.config.loss, self.config.method
        )
        self._rollouts, self._window = rollouts, 0
        self._generation += 1
        self._reading = ()
        if self._log is None and rollout.log_completions and world.is_main:
            path = Path(self.config.output_dir) / "completions.jsonl"
            self._log = CompletionLog(path, self._done)
        if self._log is not None:
            self._log.write(self._record(r, asked[r.group]) for r in rollouts)
        metrics = generation_metrics(rollouts, self.judges.names)
        if self.config.method == "online_dpo":
            metrics |= pair_metrics(rollouts, self._pairs(range(len(rollouts))))
        return metrics

    def _request(self, generation: int, position: int, prompt: Prompt) -> Request:
        rollout = self.config.rollout
        seed = self.config.seed if rollout.seed is None else rollout.seed
        mixed = np.random.SeedSequence([seed, generation, position]).generate_state(1, np.uint64)
        return Request(
            position,
            tuple(prompt.ids.tolist()),
            rollout.num_generations,
            Sampling(
                rollout.temperature,
                rollout.top_k,
                rollout.top_p,
                rollout.min_p or 0.0,
                rollout.repetition_penalty,
            ),
            self.stop_ids,
            int(mixed[0]),
            rollout.max_completion_length,
        )

    def _run_engine(self, requests: Sequence[Request]) -> list[Completion]:
        assert self._model is not None and self.engine is not None
        was_training = self._model.training
        self._model.eval()
        self.engine.wake()
        self.engine.sync_weights(self._model.named_parameters(), self._done)
        completions = generate(self.engine, requests)
        self.engine.sleep()
        self._model.train(was_training)
        return completions

    def _with_logprobs(self, rollouts: list[Rollout]) -> list[Rollout]:
        """With all that losses need of the weights of now: they are gone after the next step."""
        assert self._model is not None
        loss, method = self.config.loss, self.config.method
        needed = loss.importance_correction is not None or (method == "rloo" and loss.beta > 0)
        if method != "online_dpo" and (self.arithmetic.reused or needed):
            if self.config.rollout.old_logprobs == "engine":
                old = _sampled(rollouts)
            else:
                old = self._score(self._model, rollouts)
            rollouts = with_values(rollouts, "old_logprobs", old)
        if self._reference is not None:
            rollouts = with_values(rollouts, "ref_logprobs", self._score(self._reference, rollouts))
        return rollouts

    def _score(self, model: nn.Module, rollouts: list[Rollout]) -> dict[int, np.ndarray]:
        plain = [replace(r, extras={}) for r in rollouts]
        return score_rollouts(
            model,
            rollouts,
            lambda members: self._batch([plain[m] for m in members]),
            self._cut,
            self.world.rank,
            self.world.group,
        )

    def _record(self, r: Rollout, prompt: Prompt) -> dict[str, Any]:
        return {
            **prompt.columns,
            "step": self._done,
            "prompt": prompt.text,
            "prompt_ids": r.prompt_ids.tolist(),
            "completion": self.tokenizer.decode(r.completion_ids, skip_special_tokens=True),
            "completion_ids": r.completion_ids.tolist(),
            "logprobs": None if r.sampled_logprobs is None else r.sampled_logprobs.tolist(),
            "scored": None if r.scored.all() else r.scored.tolist(),
            "finish_reason": r.finish_reason,
            "version": r.version,
            "rewards": dict(zip(self.judges.names, map(_or_none, r.rewards), strict=True)),
            "advantage": r.advantage,
        }

    # -- windows --

    def _next_window(self, metrics: Mapping[str, float]) -> Window:
        size, rollouts = self.arithmetic.window, self._rollouts
        windows = -(-len(rollouts) // size)
        first = self._window % windows * size
        members = range(first, min(first + size, len(rollouts)))
        items: Sequence[tuple[int, ...]]
        if self.config.method == "online_dpo":
            items = self._pairs(members)
        else:
            items = [(m,) for m in members if rollouts[m].learnt]
        learnt = [rollouts[m] for item in items for m in item]
        totals = {
            "tokens": sum(r.num_scored for r in learnt),
            "processed": sum(r.length for r in learnt),
            "sequences": len(members),
            "pairs": len(items) if self.config.method == "online_dpo" else 0,
            "groups": len({rollouts[m].group for m in members}),
            "chosen_tokens": 0,
        }
        cut = cut_rollouts(rollouts, items, self._cut, self.world.rank)
        paired = self.config.method == "online_dpo"
        batches = [self._batch([rollouts[m] for m in chunk], paired=paired) for chunk in cut]
        epoch = self.prompts.epoch_after(self._generation - 1)
        self._window += 1
        self._done += 1
        if self._window == windows * self.arithmetic.num_iterations:
            self._rollouts = []
        batches = [self.entropy.mark(batch) for batch in batches]
        return Window(batches, totals, epoch, metrics)

    def _pairs(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """(chosen, rejected) of each prompt whose two completions can be compared; a tie goes to
        the first.
        """
        pairs = []
        for a, b in zip(members[0::2], members[1::2], strict=True):
            x, y = self._rollouts[a], self._rollouts[b]
            if x.learnt and y.learnt:
                pairs.append((a, b) if x.reward >= y.reward else (b, a))
        return pairs

    def _batch(self, rollouts: Sequence[Rollout], *, paired: bool = False) -> Batch:
        rollout = self.config.rollout
        if rollouts:
            examples = [r.example(pair=i // 2 if paired else -1) for i, r in enumerate(rollouts)]
            batch = build_batch(examples, **self._layout)
        else:
            batch = filler_batch()
        return replace(
            batch,
            temperature=rollout.temperature,
            max_completion_length=rollout.max_completion_length,
        )

    # -- checkpoints --

    def state_dict(self) -> dict[str, Any]:
        """Where the windows taken so far have led, with what is left of the generation."""
        return {
            "done": self._done,
            "generation": self._generation,
            "window": self._window,
            "rollouts": to_text(self._rollouts) if self._rollouts else None,
            "completions": self.arithmetic.generation,
            "prompts": self.prompts.fingerprint(),
            "entropy": self.entropy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the windows that `state` has seen.

        Raises ValueError when the prompts are not the same.
        """
        if state["prompts"] != self.prompts.fingerprint():
            raise ValueError(
                f"the prompts have changed: {self.prompts.fingerprint()} (number, tokens), the "
                f"checkpoint saw {state['prompts']}: resume with the same data and data settings"
            )
        now = self.arithmetic.generation
        if state["completions"] != now:
            raise ValueError(
                f"a generation is {now} completions, in the checkpoint {state['completions']}: set "
                "rollout.steps_per_generation so that it is the same again, whatever the ranks and "
                "train.micro_batch_size are"
            )
        self._done, self._generation = state["done"], state["generation"]
        self._window = state["window"]
        self._rollouts = from_text(state["rollouts"]) if state["rollouts"] else []
        self.entropy.load_state_dict(state["entropy"])
        if isinstance(self.engine, ReplayEngine):
            each, world = self.arithmetic.num_generations, self.world
            for number in range(self._generation):
                asked = self.prompts.generation(number)[world.rank :: world.size]
                self.engine.skip((tuple(prompt.ids.tolist()), each) for prompt in asked)


def _sampled(rollouts: Sequence[Rollout]) -> dict[int, np.ndarray]:
    values = {}
    for i, r in enumerate(rollouts):
        if r.num_scored and not r.masked:
            if r.sampled_logprobs is None:
                raise ValueError(
                    "rollout.old_logprobs engine, but the engine reported no log-probs: set trainer"
                )
            values[i] = r.sampled_logprobs[r.scored]
    return values


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def open_rollouts(config: Config, tokenizer: Tokenizer, world: World) -> tuple[RolloutFeed, str]:
    """(the feed, what to say of its prompts): all that can fail before a model is loaded.

    Raises ValueError for groups that do not fit a generation, rewards that cannot be found, and
    prompts or a replay file that cannot be read.
    """
    arithmetic = make_arithmetic(config, world.size)
    task = open_task(config, tokenizer, arithmetic) if config.rollout.task else None
    judges = open_judges(config, tokenizer, world, [task.reward()] if task else [])
    engine = None
    if config.rollout.engine == "replay":
        assert config.rollout.replay_path is not None
        engine = ReplayEngine(config.rollout.replay_path)
    if task is not None:
        first = task.generation(0)[0]
        report = f"prompts: {task.name} without end, the first has {len(first.ids)} tokens"
        return RolloutFeed(config, task, arithmetic, judges, tokenizer, world, engine), report
    prompts, report = open_prompts(config, tokenizer, arithmetic)
    return RolloutFeed(config, prompts, arithmetic, judges, tokenizer, world, engine), report
