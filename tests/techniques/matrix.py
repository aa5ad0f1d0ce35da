"""Every technique x every method x {full, lora}, from the tables of the library.

A technique enters by its switches (lean_trl/techniques/apply.py), a method by METHODS. `cells()`
says of each cell whether it is tested, or why not; `table()` is the one in docs/techniques.md.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lean_trl.config import Config, config_from_dict
from lean_trl.data.batch import build_batch
from lean_trl.model.loader import new_model
from lean_trl.model.value_head import RewardModel
from lean_trl.techniques.apply import TECHNIQUES, apply_techniques
from lean_trl.techniques.quantize import Quantization, QuantizedLinear
from lean_trl.techniques.technique import Switch
from lean_trl.train.distributed import local_part
from lean_trl.train.methods import METHODS
from lean_trl.train.score import freeze, with_ref_logprobs
from lean_trl.train.step import count_totals, train_step
from lean_trl.types import Example

from ..ranks import on_ranks
from .tiny import RAW

MODES = ("full", "lora")
LORA = {"target_modules": "all-linear", "r": 4}


# Compiling takes seconds: two methods stand for all.
COMPILED = {("sft", "full"), ("dpo", "full"), ("dpo", "lora")}
QUANTIZED = ("nf4", "int8")
IN_BACKWARD = "optimizer_in_backward"
CHECKPOINTING = "memory.activation_checkpointing"
OFFLOADING = "memory.activation_offloading"
# Options of techniques, each with what it is an option of.
VARIANTS = (
    Switch("selective", {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs.selective": True}, {}),
    Switch("every 2", {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs.every": 2}, {}),
    Switch("budget 0.5", {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs.budget": 0.5}, {}),
    Switch("offloading + checkpointing", {CHECKPOINTING: True, OFFLOADING: True}, {}),
    Switch(
        "offloading, one stream", {OFFLOADING: True, f"{OFFLOADING}_kwargs.use_streams": False}, {}
    ),
    Switch("pad_to_multiple_of", {"data.padding_free": True, "data.pad_to_multiple_of": 16}, {}),
)


def switches() -> dict[str, Switch]:
    """Every part of a technique that can be had alone; `lora` is a mode here, not a row."""
    library = [switch for kind in TECHNIQUES for switch in kind.switches()]
    found = {switch.name: switch for switch in (*library, *VARIANTS)}
    return {name: switch for name, switch in found.items() if name not in MODES}


def not_applicable(switch: Switch) -> str | None:
    """Why a row is not run on this machine."""
    if switch.device_type == "cuda" and not torch.cuda.is_available():
        return "needs a GPU: without one everything is in CPU memory"
    return None


@dataclass(frozen=True)
class Cell:
    row: str
    method: str
    mode: str
    reason: str | None = None  # why it is not tested


def cells() -> list[Cell]:
    """All cells, and the row of all exact techniques at once."""
    rows = {name: not_applicable(switch) for name, switch in switches().items()}
    rows["all at once"] = None
    frozen = "refused: the base is frozen, so something else must be trained"
    slow = "n/a: compiling takes seconds, and blocks do not know methods: three cells stand for all"

    def why(row: str, method: str, mode: str) -> str | None:
        if row in QUANTIZED and mode == "full":
            return frozen
        return slow if row == "compile" and (method, mode) not in COMPILED else rows[row]

    return [
        Cell(row, method, mode, why(row, method, mode))
        for row in rows
        for method in METHODS
        for mode in MODES
    ]


def table() -> str:
    """Rows of techniques, columns of methods; a cell says what was tested in it."""
    lines = ["| technique | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 1) + "|"]
    for row in dict.fromkeys(cell.row for cell in cells()):
        of_row = [cell for cell in cells() if cell.row == row]
        marks = [
            " + ".join(c.mode for c in of_row if c.method == m and c.reason is None) or "n/a"
            for m in METHODS
        ]
        lines.append(f"| {row} | " + " | ".join(marks) + " |")
    tested = sum(cell.reason is None for cell in cells())
    refused = sum("refused" in (cell.reason or "") for cell in cells())
    rest = len(cells()) - tested - refused
    lines.append(
        f"\n{tested} cells are tested; {rest} are n/a: no GPU here, or compiling, for which three "
        f"cells stand for all; {refused} are refused: a base in few bits is frozen, so full "
        "fine-tuning has nothing to train."
    )
    return "\n".join(lines)


def settings(method: str, mode: str, chosen: list[Switch]) -> Config:
    """All techniques off but the chosen ones."""
    flat = {"method": method}
    for switch in switches().values():
        flat |= switch.off
    for switch in chosen:
        flat |= switch.on
    tree: dict = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        below = tree
        for section in sections:
            below = below.setdefault(section, {})
        below[name] = value
    tree["loss"] = {"beta": 0.1} if method in ("grpo", "rloo") else {}
    tree["train"] |= {"learning_rate": 1e-3, "weight_decay": 0.1}
    if mode == "lora":
        tree["peft"] = dict(LORA)
    return config_from_dict(tree)


def window(method: str, config: Config) -> list:
    """Two micro-batches of unequal sequences, with what the method's objective reads."""
    rng = np.random.default_rng(5)
    layout = config.data.padding_free, config.data.pad_to_multiple_of
    build = partial(build_batch, padding_free=layout[0], pad_to_multiple_of=layout[1])
    paired = method in ("dpo", "reward", "online_dpo")
    batches = []
    for number in range(2):
        examples = []
        for index, length in enumerate((19, 12, 7, 15)):
            extras = {"label": bool(index % 2)} if method == "kto" else {}
            if method in ("grpo", "rloo"):
                extras = {"advantages": float(rng.normal())}
            if method == "online_dpo":
                extras = {"reward": float(rng.normal())}
            pair = 2 * number + index // 2 if paired else -1
            scored = np.arange(length) >= 4
            examples.append(Example(rng.integers(1, 60, length), scored, extras, pair=pair))
        batch = build(examples)
        if method == "grpo":  # rloo's ratio of whole completions would be clipped
            noise = torch.from_numpy(rng.normal(-4, 0.3, batch.num_units)).float()
            batch = batch.with_extras(old_logprobs=noise)
        if method in ("grpo", "rloo"):
            batch = replace(batch, max_completion_length=16)
        if method == "kto":
            batch = replace(batch, mismatched=build(examples[::-1]))
        batches.append(batch)
    return batches


class Keep(Optimizer):
    """Steps like the optimizer it wraps, and keeps the gradients that it stepped on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner, self.grads = optimizer, {}
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = parameter.grad
                    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                    self.grads[parameter] = whole.clone()
        self.inner.step()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


@dataclass
class Result:
    loss: float
    grad_norm: float
    grads: dict[str, torch.Tensor]  # empty when they are gone before the step
    weights: dict[str, torch.Tensor]  # after the step


def make_model(config: Config):
    options = {"kind": RewardModel} if config.method == "reward" else {}
    return new_model(RAW | {"num_hidden_layers": 3}, 0, **options)


def fill_adapters(model) -> None:
    """The same numbers for adapters on any rank; none of them zero."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora" in name:
            rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = 0.1 * torch.randn(parameter.shape, generator=rng)
            rows, first = local_part(parameter)
            rows.copy_(whole[first : first + len(rows)])


def run(
    method_name: str, mode: str, chosen: list[Switch], world=None, batches=2, rounded=None
) -> Result:
    """One step of the method with the chosen techniques over so many micro-batches.

    rounded: a row of QUANTIZED, whose values the weights have.
    """
    from lean_trl.train.optim import build_optimizer

    config = settings(method_name, mode, chosen)
    method = METHODS[method_name].bind(config.loss)
    in_backward = config.memory.optimizer_in_backward
    batches = window(method_name, config)[:batches]
    totals = count_totals(batches)
    if method.reference:
        reference = freeze(new_model(RAW | {"num_hidden_layers": 3}, 1))
        batches = [with_ref_logprobs(reference, batch) for batch in batches]
    if world is not None:
        batches = [batches[world.rank]]
    model = make_model(config)
    if rounded is not None:
        round_weights(model, settings(method_name, "lora", [switches()[rounded]]))
    around = apply_techniques(model, config)
    fill_adapters(model)
    optimizer = build_optimizer(model, config.train, in_backward)
    if in_backward is None:
        optimizer = Keep(optimizer)
    report = train_step(
        model,
        batches,
        method,
        optimizer,
        totals=totals,
        max_grad_norm=None,
        around=around,
        group=None if world is None else world.group,
    )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    kept = {} if in_backward else optimizer.grads
    grads = {name: kept[p] for name, p in trained.items() if p in kept}
    weights = {name: p.detach() for name, p in trained.items()}
    return Result(report.loss.item(), report.grad_norm.item(), grads, weights)


@cache
def baseline(method: str, mode: str, row: str = "") -> Result:
    """The step with no technique at all, on what the row's step is about."""
    batches = 1 if row == IN_BACKWARD else 2
    return run(method, mode, [], batches=batches, rounded=row if row in QUANTIZED else None)


def round_weights(model, config: Config) -> None:
    """Give the linear layers of the blocks the values that quantisation leaves of them."""
    other = make_model(config)
    Quantization(config).on_model(other)
    for name, layer in other.named_modules():
        if isinstance(layer, QuantizedLinear):
            model.get_submodule(name).weight.data.copy_(layer.weight)


def run_cell(cell: Cell) -> list[Result]:
    """The cell's step, once a rank."""
    table = switches()
    chosen = [table[cell.row]] if cell.row in table else everything()
    if cell.row == IN_BACKWARD:
        return [run(cell.method, cell.mode, chosen, batches=1)]
    if max(switch.ranks for switch in chosen) == 1:
        return [run(cell.method, cell.mode, chosen)]
    return on_ranks(2, lambda world: run(cell.method, cell.mode, chosen, world))


def everything() -> list[Switch]:
    """All techniques that go together here; the last one of each setting wins."""
    # The step has two micro-batches, on a rank each; an optimizer in backward knows one.
    without = {variant.name for variant in VARIANTS} - {"selective"}
    without |= {IN_BACKWARD, "compile", *QUANTIZED}
    chosen = [switch for name, switch in switches().items() if name not in without]
    return [switch for switch in chosen if not_applicable(switch) is None]


def write_table(path) -> None:
    """Put the table into the document, between its two comments."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- matrix -->\n")
    _, _, after = rest.partition("<!-- end of matrix -->")
    new = f"{before}<!-- matrix -->\n{table()}\n<!-- end of matrix -->{after}"
    path.write_text(new, encoding="utf-8")


if __name__ == "__main__":  # python -m tests.techniques.matrix
    from pathlib import Path

    write_table(Path("docs/techniques.md"))
