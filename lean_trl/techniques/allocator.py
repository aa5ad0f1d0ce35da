"""CUDA's caching allocator: segments that grow instead of new ones beside the old.

Batches differ in their number of tokens. With fixed segments a larger one finds no room in what a
smaller one left; expandable segments are mapped page by page into one range.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from lean_trl.config import Config
from lean_trl.techniques.technique import Evidence, Switch, Technique, Trial

# torch >= 2.10 prefers the first name; vLLM reads only the second. Both must say the same.
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
OPTION = "expandable_segments"


class Allocator(Technique):
    """`memory.expandable_segments`; null: where there is a GPU."""

    name = "expandable_segments"
    settings = ("memory.expandable_segments",)

    def __init__(self, config: Config) -> None:
        wanted = config.memory.expandable_segments
        self.enabled = torch.cuda.is_available() if wanted is None else wanted

    @classmethod
    def switches(cls) -> tuple[Switch, ...]:
        (switch,) = super().switches()
        return (switch._replace(device_type="cuda"),)

    def before_cuda(self, environment: MutableMapping[str, str]) -> None:
        environment.update(with_expandable_segments(environment))

    def evidence(self, trial: Trial) -> Evidence:
        segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
        growing = sum(bool(segment.get("is_expandable")) for segment in segments)
        return Evidence(growing, f"{growing} of {len(segments)} segments of GPU memory can grow")


def with_expandable_segments(environment: MutableMapping[str, str]) -> dict[str, str]:
    """{variable: value} that torch and vLLM read: what the user set, and growing segments.

    Raises ValueError when the two variables differ, or when the user has switched them off.

    >>> with_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"})[NAMES[0]]
    'max_split_size_mb:512,expandable_segments:True'
    """
    given = {environment[name] for name in NAMES if environment.get(name)}
    if len(given) > 1:
        both = " and ".join(f"{name}={environment[name]}" for name in NAMES)
        raise ValueError(f"{both} differ, and torch and vLLM read one each: set both to one value")
    value = given.pop() if given else ""
    options = dict(part.partition(":")[::2] for part in value.split(",") if part)
    chosen = options.get(OPTION)
    if chosen is None:
        value = f"{value},{OPTION}:True" if value else f"{OPTION}:True"
    elif chosen.strip().lower() != "true":
        raise ValueError(
            f"{OPTION} is off in the environment ({value}): set memory.{OPTION} false, or leave "
            "it out of the variable"
        )
    return dict.fromkeys(NAMES, value)
