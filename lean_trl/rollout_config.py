"""The settings of rollouts, and the checks across them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from lean_trl.settings import Count, Index, NonNegative, Number, Positive, is_default, setting

ONLINE = ("grpo", "rloo", "online_dpo")
OFFLINE = ("sft", "dpo", "reward", "kto")
Several = Annotated[int, Field(ge=2, description="int >= 2")]
UpToOne = Annotated[float, Field(gt=0, le=1, description="number > 0 and <= 1")]
Share = Annotated[float, Field(ge=0, le=1, description="number from 0 to 1")]


def _by_method(default: float, **others: float) -> dict[str, float]:
    """A default for every method; offline ones show it and read it never."""
    return {method: default for method in OFFLINE + ONLINE} | others


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["native", "replay"] = setting(
        "native", "native: the model itself with a cache; replay: completions from replay_path"
    )
    num_generations: Several = setting(
        None,
        "completions of each prompt",
        per_method=_by_method(8, rloo=2, online_dpo=2),
    )
    max_completion_length: Count = setting(
        None,
        "tokens of a completion at most",
        per_method=_by_method(512, online_dpo=64),
    )
    temperature: Positive = setting(
        None,
        "of sampling, and of every log-probability of training",
        per_method=_by_method(1.0, online_dpo=0.9),
    )
    top_p: UpToOne = setting(1.0, "sample from the fewest tokens that hold this much probability")
    top_k: Index = setting(0, "sample from the k most likely tokens; 0: all")
    min_p: Share | None = setting(
        None, "sample from tokens at least this times as likely as the most likely"
    )
    repetition_penalty: Positive = setting(1.0, "above 1: tokens seen before become less likely")
    stop_token_ids: list[Index] | None = setting(
        None, "ids that end a completion; null: those that model and template declare"
    )
    seed: Index | None = setting(None, "of sampling; null: the run's seed")
    num_iterations: Count = setting(1, "times that each generation is learnt from")
    steps_per_generation: Count | None = setting(
        None,
        "micro-batches of one generation on one rank, whole steps of them; null: one step's",
    )
    old_logprobs: Literal["trainer", "engine"] = setting(
        "trainer",
        "whose log-probs the ratio starts from: engine saves a forward of each generation",
    )
    reward_funcs: list[str] | str | None = setting(
        None, "built-in names, package.module.function or path/file.py:function"
    )
    reward_weights: list[Number] | None = setting(None, "weight of each reward; null: 1 each")
    reward_timeout_s: Positive | None = setting(
        None, "seconds a reward function may take for a generation; then it has abstained"
    )
    reward_model_path: str | None = setting(
        None, "folder or hub id of a reward model, one more reward after reward_funcs"
    )
    task: str | None = setting(None, "reasoning_gym:<name>: endless prompts with their own reward")
    task_options: dict[str, Any] | None = setting(None, "settings of the task's generator")
    gather_for_generation: bool = setting(
        True, "sharded weights stay whole while generating; false: one block at a time"
    )
    kv_cache_gib: Positive = setting(2.0, "most memory of the native engine's keys and values")
    replay_path: str | None = setting(None, "file of completions for engine replay")
    log_completions: bool = setting(
        False, "write every completion to completions.jsonl, which engine replay reads"
    )


def rollout_contradictions(rollout: RolloutConfig, method: str, data_path: object) -> Iterator[str]:
    """What is wrong with the rollout settings of a method, each with its way out."""
    if method not in ONLINE:
        for item in fields(rollout):
            if not is_default(rollout, item.name, method):
                yield f"rollout.{item.name} has no effect on method {method}: leave it out"
        return
    if method == "online_dpo" and rollout.num_generations != 2:
        yield (
            f"rollout.num_generations {rollout.num_generations}: online_dpo compares 2 completions "
            "of each prompt: set it to 2"
        )
    replayed = rollout.engine == "replay"
    if replayed and not rollout.replay_path:
        yield "rollout.engine replay needs rollout.replay_path: name the file of completions"
    if rollout.replay_path and not replayed:
        yield "rollout.replay_path has no effect without rollout.engine replay: set that too"
    if rollout.task and data_path is not None:
        yield f"rollout.task {rollout.task} makes its own prompts: leave data.path out"
    if rollout.task_options and not rollout.task:
        yield "rollout.task_options has no effect without rollout.task: set that too"
    names = reward_names(rollout)
    if not (names or rollout.reward_model_path or rollout.task or replayed or data_path is None):
        yield (
            "no reward: set rollout.reward_funcs (built-in names, package.module.function or "
            "path/file.py:function) or rollout.reward_model_path"
        )
    count = len(names) + bool(rollout.reward_model_path) + bool(rollout.task)
    if rollout.reward_weights is not None and len(rollout.reward_weights) != max(count, 1):
        yield (
            f"rollout.reward_weights has {len(rollout.reward_weights)} weights for "
            f"{max(count, 1)} rewards: give one for each"
        )


def reward_names(rollout: RolloutConfig) -> list[str]:
    """reward_funcs as a list."""
    names = rollout.reward_funcs
    return [names] if isinstance(names, str) else list(names or [])


@dataclass(frozen=True)
class ImportanceCorrection:
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = setting(
        "sequence_mask", "ratio of each token or of the completion; clamp it, or 0 outside"
    )
    clip_min: NonNegative | None = setting(None, "least ratio")
    clip_max: Positive | None = setting(3.0, "largest ratio")
