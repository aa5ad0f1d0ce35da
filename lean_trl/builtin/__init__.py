"""What a run without a recipe trains: a tiny Qwen3-shaped model on arithmetic with worked steps.

The model's folder holds no weights: they come from the run's seed. Its files are what
`scripts/make_builtin.py` writes; the dataset is made on first use.
"""

from pathlib import Path

from lean_trl.builtin.dataset import dataset_folder, dataset_path
from lean_trl.builtin.problems import answer_of

__all__ = ["answer_of", "dataset_folder", "dataset_path", "model_folder"]


def model_folder() -> Path:
    """The folder with config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    return Path(__file__).parent / "model"
