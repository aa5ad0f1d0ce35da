"""Post-training for language models in plain PyTorch.

The names below load on first use: `import lean_trl` pulls in nothing, not even torch.

    from lean_trl import Example, build_batch, load_model
    model = load_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    scores = model(build_batch([Example([1, 2, 3])]))           # scores.logprobs: fp32 [2]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# Public name -> the module that defines it.
_HOME = {
    "Batch": "types",
    "Config": "config",
    "Example": "types",
    "LossTerms": "types",
    "Metric": "types",
    "Scores": "types",
    "Term": "types",
    "build_batch": "data.batch",
    "load_config": "config",
    "pack": "data.packing",
    "load_model": "model.loader",
    "save_model": "model.loader",
    "METHODS": "train.methods",
    "Method": "types",
    "apply_techniques": "techniques.apply",
    "train_step": "train.step",
}
__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from lean_trl.config import Config as Config
    from lean_trl.config import load_config as load_config
    from lean_trl.data.batch import build_batch as build_batch
    from lean_trl.data.packing import pack as pack
    from lean_trl.model.loader import load_model as load_model
    from lean_trl.model.loader import save_model as save_model
    from lean_trl.techniques.apply import apply_techniques as apply_techniques
    from lean_trl.train.methods import METHODS as METHODS
    from lean_trl.train.step import train_step as train_step
    from lean_trl.types import Batch as Batch
    from lean_trl.types import Example as Example
    from lean_trl.types import LossTerms as LossTerms
    from lean_trl.types import Method as Method
    from lean_trl.types import Metric as Metric
    from lean_trl.types import Scores as Scores
    from lean_trl.types import Term as Term


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lean_trl' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lean_trl.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
