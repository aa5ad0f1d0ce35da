"""What torchrun starts in test_torchrun.py: a run with dropout, and a rank that fails at a step.

rank.py recipe.yaml [--fail RANK:STEP:HOW] [--section.key value ...]      HOW: raise kill term
A failure happens in the first attempt only: torchrun may start the ranks again.
"""

import os
import signal
import sys

import torch
from torch.nn import functional as F

from lean_trl.config import load_config
from lean_trl.data import feed, stream
from lean_trl.train import loop, setup


def with_dropout(config, device, open_model=setup.open_model):
    model = open_model(config, device)
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda m, args, out: F.dropout(out, 0.1, m.training))
    return model


def failing(rank: int, step: int, how: str, build_batch=feed.build_batch):
    calls = [0]

    def build(examples, **layout):
        calls[0] += 1
        if int(os.environ["RANK"]) == rank and calls[0] == step:
            if how == "raise":
                raise KeyError(f"broken row {examples[0].source[1]}")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)
        return build_batch(examples, **layout)

    return build


def main() -> None:
    arguments = sys.argv[1:]
    if "--fail" in arguments:
        place = arguments.index("--fail")
        rank, step, how = arguments[place + 1].split(":")
        del arguments[place : place + 2]
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            feed.build_batch = stream.build_batch = failing(int(rank), int(step), how)
    setup.open_model = with_dropout
    torch.set_num_threads(1)
    loop.train(load_config(arguments))


if __name__ == "__main__":
    main()
