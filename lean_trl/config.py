"""The settings of a run: every key with its type, default and meaning, and the checks across keys.

    config = load_config(["recipes/smollm2_gsm8k.yaml", "--train.max_steps", "60"])
    config.train.max_steps                                      # 60
    save_config(config, "outputs/config.yaml")                  # loads again to an equal Config

Where a concept is TRL's, so are its name and default, unless the help says otherwise.
This module must not import torch: `scripts/train.py --help` and wrong settings answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from lean_trl.foreign_names import FOREIGN_NAMES
from lean_trl.loss_config import LossConfig, loss_contradictions
from lean_trl.memory_config import (
    MemoryConfig,
    in_backward_contradictions,
    memory_contradictions,
)
from lean_trl.peft_config import (
    PeftConfig,
    QuantizationConfig,
    peft_contradictions,
    quantization_contradictions,
)
from lean_trl.recipe import SettingsError, read_recipe, to_yaml, with_overrides
from lean_trl.rollout_config import ONLINE, RolloutConfig, rollout_contradictions
from lean_trl.settings import (
    Count,
    Fraction,
    Index,
    NonNegative,
    Positive,
    build,
    help_text,
    method_defaults,
    setting,
)

LEARNING_RATES = {
    "sft": 2e-5,
    "dpo": 1e-6,
    "kto": 1e-6,
    "grpo": 1e-6,
    "rloo": 1e-6,
    "reward": 1e-4,
    "online_dpo": 5e-7,
}


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = setting(None, "local folder or hub id; null: the built-in tiny model")
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "what the model computes in")
    attention: Literal["auto", "torch_varlen", "sdpa", "math"] = setting(
        "auto", "backend of lean::varlen_attention"
    )
    chat_template: str | None = setting(
        None, "a Jinja file that replaces the tokenizer's chat template"
    )
    ref_path: str | None = setting(
        None, "folder or hub id of the frozen reference; null: the model that training starts from"
    )


@dataclass(frozen=True)
class DataConfig:
    path: str | list[str | dict[str, Any]] | None = setting(
        None,
        "file, folder, hub id, or a list of them or {path, weight}; null: built-in arithmetic",
    )
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    split: str | None = setting(None, "split to train on; null: train")
    eval_path: str | None = setting(None, "file, folder or hub id of held-out rows")
    eval_split: str | None = setting(None, "held-out split, of eval_path or else of path")
    text_column: str | None = setting(None, "column that holds plain text; null: text")
    columns: dict[str, Any] | None = setting(
        None, "our column -> the file's, or a text with {column} in it: {prompt: '{question}'}"
    )
    max_prompt_length: Count | None = setting(
        None, "online methods: rows with a longer prompt are dropped; null: none"
    )
    max_length: Count | None = setting(1024, "tokens kept of one sequence; null: all")
    truncation_mode: Literal["keep_start", "keep_end"] = setting("keep_start", "which end survives")
    overlong: Literal["truncate", "drop"] = setting(
        None,
        "what happens to a sequence over max_length",
        per_method={m: "drop" if m == "reward" else "truncate" for m in LEARNING_RATES},
    )
    packing: bool = setting(False, "fill bins of max_length with rows that do not see each other")
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = setting(
        "bfd", "best fit; best fit of fragments, nothing cut off; one after another"
    )
    wrapped_attention: bool = setting(False, "wrapped rows of a bin see each other")
    completion_only_loss: bool | None = setting(
        None, "learn the completion alone; null: when rows have prompt and completion"
    )
    assistant_only_loss: bool = setting(False, "of a conversation learn only the assistant's turns")
    shuffle: bool = setting(True, "a new order of the rows each epoch, from the seed")
    streaming: bool = setting(
        False, "read rows as training goes, in constant memory; needs max_steps"
    )
    padding_free: bool = setting(
        True, "false pads each micro-batch to its longest row: only to measure what that costs"
    )
    pad_to_multiple_of: Count | None = setting(
        None, "round a micro-batch's tokens up (padding_free: false: each row's)"
    )
    cache_dir: str | None = setting(
        None, "prepared rows are kept here; null: lean_trl in huggingface_hub's HF_HOME"
    )


@dataclass(frozen=True)
class TrainConfig:
    batch_size: Count | None = setting(
        None, "sequences of one step over all ranks; null: micro_batch_size x accumulation x ranks"
    )
    micro_batch_size: Count = setting(4, "sequences of one forward on one rank")
    max_tokens_per_micro_batch: Count | None = setting(
        None, "cut the step's sequences by this token budget instead of by micro_batch_size"
    )
    gradient_accumulation_steps: Count | None = setting(
        None, "micro-batches of one step on one rank; null: 1, or what batch_size needs"
    )
    num_epochs: Count = setting(1, "passes over the data when max_steps is null")
    max_steps: Count | None = setting(
        None, "optimizer steps; wins over num_epochs, and the data repeat"
    )
    learning_rate: NonNegative = setting(None, "peak learning rate", per_method=LEARNING_RATES)
    lr_scheduler: Literal["linear", "cosine", "constant", "wsd"] = setting(
        "linear", "decay after the warm-up, to 0; wsd: constant, then linear over the last tenth"
    )
    warmup_steps: Index = setting(
        0, "step s of these (from 0) runs at s / warmup_steps of the peak"
    )
    weight_decay: NonNegative = setting(0.0, "on matrices and embeddings only")
    adam_beta1: Fraction = setting(0.9, "decay of the first moment")
    adam_beta2: Fraction = setting(0.999, "decay of the second moment")
    adam_epsilon: Positive = setting(1e-8, "added to the root of the second moment")
    max_grad_norm: Positive | None = setting(
        1.0, "clip the gradient's global norm; null: only measure it"
    )
    optimizer: Literal[
        "adamw", "adamw_bf16_sr", "adamw_8bit", "adamw_4bit", "adafactor", "muon"
    ] = setting("adamw", "adamw_*: AdamW with moments of 16, 8 or 4 bits instead of 32")
    param_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "what trained parameters are stored in"
    )
    deterministic: bool = setting(
        True, "deterministic algorithms: the same run gives the same bits"
    )
    eval_every: Count | None = setting(
        None, "steps between evaluations; null: before and after only"
    )


@dataclass(frozen=True)
class DistributedConfig:
    sharding: Literal["none", "fsdp", "hsdp"] | None = setting(
        None,
        "none: replicas; fsdp: cut over all ranks; hsdp: cut replicas; null: fsdp when world > 1",
    )
    replicas: Count | None = setting(None, "hsdp: how many copies; null: one a host")
    reshard_after_forward: bool = setting(
        True, "free a block's gathered weights after its forward and gather them again in backward"
    )
    reduce_dtype: Literal["float32", "bfloat16"] | None = setting(
        None, "what gradients are summed over ranks in; null: train.param_dtype"
    )
    timeout_s: Positive = setting(600.0, "seconds that a collective may wait for the other ranks")


@dataclass(frozen=True)
class CheckpointConfig:
    every: Index = setting(500, "steps between checkpoints; 0: only after the last step")
    keep: Count | None = setting(2, "how many of the newest stay; null: all")
    resume: Literal["auto", "always", "never"] = setting(
        "auto", "auto: from the newest, if the settings are its own; always: whatever they are"
    )
    async_save: bool = setting(False, "write from a copy in CPU memory while the steps go on")
    export_hf: bool = setting(True, "write model/ in Hugging Face's layout at the end")


@dataclass(frozen=True)
class LoggingConfig:
    every: Count = setting(1, "steps between lines of metrics.jsonl")
    progress: bool = setting(True, "show a progress bar (sparse lines where stderr is no terminal)")
    tensorboard: bool = setting(False, "write output_dir/tensorboard too")
    wandb: str | None = setting(None, "project on wandb that gets the numbers too")
    trackio: str | None = setting(None, "project of trackio that gets the numbers too")


@dataclass(frozen=True)
class Config:
    """All settings of a run, resolved: no value depends on a default that is not in it.

    Raises SettingsError (a ValueError) when settings contradict each other.

    >>> Config(train=TrainConfig(max_steps=60)).train.learning_rate
    2e-05
    """

    method: Literal["sft", "dpo", "reward", "kto", "grpo", "rloo", "online_dpo"] = setting(
        "sft", "what to train"
    )
    output_dir: str = setting("outputs", "metrics.jsonl, config.yaml and model/ are written here")
    seed: Index = setting(0, "of the data order and of new weights")
    eval_only: bool = setting(False, "evaluate, train nothing")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    peft: PeftConfig | None = None
    quantization: QuantizationConfig | None = None
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        for item in fields(self):
            filled = method_defaults(getattr(self, item.name), self.method)
            object.__setattr__(self, item.name, filled)
        problems = list(_contradictions(self))
        if problems:
            raise SettingsError("\n".join(problems))


def _contradictions(config: Config) -> Iterator[str]:
    """What is wrong across keys, each with its way out."""
    model, data, train = config.model, config.data, config.train
    yield from loss_contradictions(config.loss, config.method)
    yield from rollout_contradictions(config.rollout, config.method, data.path)
    yield from _online_contradictions(config)
    yield from _data_contradictions(data)
    yield from memory_contradictions(config.memory)
    yield from in_backward_contradictions(
        config.memory,
        micro_batches=_micro_batches(train),
        micro_batch_size=train.micro_batch_size,
        max_grad_norm=train.max_grad_norm,
    )
    yield from quantization_contradictions(config.quantization, config.peft)
    yield from peft_contradictions(config.peft, config.loss, config.model.ref_path)
    if model.ref_path and config.method in ("sft", "reward"):
        yield f"model.ref_path has no effect on method {config.method}: leave it out"
    if train.param_dtype == "bfloat16" and not train.optimizer.startswith("adamw_"):
        yield (
            f"train.param_dtype: bfloat16 loses updates smaller than 2^-9 of a weight, and "
            f"{train.optimizer} does not round them stochastically: set float32, or "
            "train.optimizer adamw_bf16_sr, adamw_8bit or adamw_4bit"
        )
    if config.distributed.replicas and config.distributed.sharding != "hsdp":
        yield "distributed.replicas has an effect only with distributed.sharding hsdp: set that too"
    if train.batch_size and train.gradient_accumulation_steps:
        per_rank = train.micro_batch_size * train.gradient_accumulation_steps
        if train.batch_size % per_rank:
            yield (
                f"train.batch_size {train.batch_size} is no multiple of micro_batch_size x "
                f"gradient_accumulation_steps = {per_rank}: leave one of the two out"
            )
    if train.max_steps and train.warmup_steps > train.max_steps:
        yield (
            f"train.warmup_steps {train.warmup_steps} is more than train.max_steps "
            f"{train.max_steps}: lower it"
        )
    if model.path is None and model.revision:
        yield "model.revision has no effect on the built-in model: set model.path"
    if data.path and not (data.eval_path or data.eval_split):
        for key, wanted in (
            ("train.eval_every", train.eval_every),
            ("eval_only", config.eval_only),
        ):
            if wanted:
                yield f"{key} needs held-out rows: set data.eval_path or data.eval_split"


def _data_contradictions(data: DataConfig) -> Iterator[str]:
    """Data settings that another one leaves without effect."""
    if data.truncation_mode == "keep_end":
        if data.max_length is None:
            yield (
                "data.truncation_mode: keep_end has no effect while data.max_length is null: "
                "set one"
            )
        elif data.overlong == "drop":
            yield "data.truncation_mode: keep_end has no effect while data.overlong is drop"
    if data.packing_strategy != "bfd" and not data.packing:
        yield "data.packing_strategy has no effect while data.packing is false: set that true"
    if data.packing and data.packing_strategy != "bfd":
        for key, value, default in (
            ("truncation_mode", data.truncation_mode, "keep_start"),
            ("overlong", data.overlong, "truncate"),
        ):
            if value != default:
                yield (
                    f"data.{key} {value} has no effect while data.packing_strategy is "
                    f"{data.packing_strategy}, which cuts nothing off: leave one of them out"
                )
    if data.wrapped_attention and not (data.packing and data.packing_strategy == "wrapped"):
        yield "data.wrapped_attention needs data.packing true and packing_strategy wrapped"
    if data.revision and data.path is None:
        yield "data.revision has no effect on the built-in rows: set data.path"


def _online_contradictions(config: Config) -> Iterator[str]:
    """Data settings that do not fit where sequences come from."""
    data = config.data
    if config.method not in ONLINE:
        if data.max_prompt_length is not None:
            yield f"data.max_prompt_length has no effect on method {config.method}: leave it out"
        return
    if config.rollout.task and config.train.max_steps is None:
        yield "rollout.task is endless: set train.max_steps"
    wanted = {
        "data.packing": data.packing,
        "data.eval_path": data.eval_path,
        "data.eval_split": data.eval_split,
        "train.eval_every": config.train.eval_every,
        "eval_only": config.eval_only,
    }
    for key, value in wanted.items():
        if value:
            yield f"{key} has no effect on method {config.method}: leave it out"


def _micro_batches(train: TrainConfig) -> int | None:
    """Of one step on one rank, as far as settings tell; None: it depends on the rows."""
    if train.max_tokens_per_micro_batch:
        return None
    if train.gradient_accumulation_steps:
        return train.gradient_accumulation_steps
    return -(-(train.batch_size or 1) // train.micro_batch_size)


def units_per_step(train: TrainConfig, world_size: int) -> int:
    """Units (sequences, or pairs for preferences) of one optimizer step over all ranks.

    Raises SettingsError when batch_size and gradient_accumulation_steps are both set and disagree.

    >>> units_per_step(TrainConfig(micro_batch_size=4, gradient_accumulation_steps=2), world_size=2)
    16
    """
    micro_batches = train.gradient_accumulation_steps or 1
    counted = train.micro_batch_size * micro_batches * world_size
    if train.batch_size is None:
        return counted
    if train.gradient_accumulation_steps and counted != train.batch_size:
        raise SettingsError(
            f"train.batch_size {train.batch_size} is not micro_batch_size {train.micro_batch_size} "
            f"x gradient_accumulation_steps {micro_batches} x {world_size} ranks = {counted}: "
            f"leave one of them out"
        )
    return train.batch_size


def load_config(arguments: Sequence[str] = ()) -> Config:
    """The Config that a command line, `[recipe.yaml] [--section.key value ...]`, asks for.

    Raises SettingsError with one line for each problem.

    >>> load_config(["--train.max_steps=60", "--data.shuffle", "false"]).data.shuffle
    False
    """
    overrides = list(arguments)
    recipe = (
        read_recipe(overrides.pop(0)) if overrides and not overrides[0].startswith("--") else {}
    )
    return config_from_dict(with_overrides(recipe, overrides))


def config_from_dict(tree: Mapping[str, Any]) -> Config:
    """The Config that a nested map (a parsed recipe) describes."""
    return build(Config, tree, FOREIGN_NAMES)


def config_from_command_line(usage: str | None, arguments: Sequence[str] | None = None) -> Config:
    """load_config for a script: prints help or the problems and exits (0 or 2) instead of raising.

    usage: the script's docstring, printed above the list of keys.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        print(f"{(usage or '').strip()}\n{help_text(Config)}", end="")
        raise SystemExit(0)
    try:
        return load_config(arguments)
    except SettingsError as error:
        print(f"{error}\n(--help lists every key)", file=sys.stderr)
        raise SystemExit(2) from None


def config_to_yaml(config: Config) -> str:
    """The resolved settings as a recipe that loads again to an equal Config."""
    return to_yaml(asdict(config))


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved settings as a recipe."""
    Path(path).write_text(config_to_yaml(config), encoding="utf-8")
