"""The learning rate as a pure function of the step: warm-up, then linear, cosine or no decay.

The same numbers as transformers' get_scheduler, on the number of optimizer steps that will be run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# Share of the decay that is done (0..1) -> factor.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "constant": lambda done: 1.0,
    # Warm-up, stable, decay (Hu et al. 2024, MiniCPM, section 4): the last tenth decays.
    "wsd": lambda done: min(1.0, (1.0 - done) / 0.1),
}


def check_schedule(name: str, steps: int | None, warmup_steps: int) -> None:
    """Raise ValueError before the first step for what would go wrong, or unnoticed, in a later one.

    >>> check_schedule("linear", 8, 100)
    Traceback (most recent call last):
    ValueError: train.warmup_steps 100 is more than the 8 steps of the run: lower it
    """
    if steps is not None and warmup_steps > steps:
        raise ValueError(
            f"train.warmup_steps {warmup_steps} is more than the {steps} steps of the run: lower it"
        )
    lr_factor(name, warmup_steps, steps, warmup_steps)


def lr_factor(name: str, step: int, steps: int | None, warmup_steps: int = 0) -> float:
    """What the peak learning rate is multiplied by at optimizer step `step` (from 0) of `steps`.

    step / warmup_steps during the warm-up (its first step runs at 0), then the decay `name`, which
    reaches 0 one step after the last. steps None: unknown, constant only.
    Raises ValueError for an unknown name or a decay over an unknown number of steps.

    >>> [round(lr_factor("linear", s, 3), 6) for s in range(3)]
    [1.0, 0.666667, 0.333333]
    >>> [lr_factor("constant", s, None, warmup_steps=2) for s in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    >>> [round(lr_factor("wsd", s, 20), 6) for s in (0, 18, 19)]
    [1.0, 1.0, 0.5]
    """
    if name not in DECAYS:
        raise ValueError(f"lr_scheduler {name!r} is unknown: choose one of {', '.join(DECAYS)}")
    if step < warmup_steps:
        return step / warmup_steps
    if steps is None:
        if name != "constant":
            raise ValueError(
                f"lr_scheduler {name} must know where to end and the data have no length: "
                f"set train.max_steps, or train.lr_scheduler constant"
            )
        return 1.0
    return DECAYS[name](min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps)))
