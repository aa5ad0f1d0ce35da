"""A random model of a known shape with rows and a recipe, for benchmarks without any download.

    python benchmarks/shapes.py 0.6b FOLDER       FOLDER/recipe.yaml runs as it is

Weights are random, rows are random ids of mixed lengths: memory and speed do not depend on them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np

from lean_trl import builtin
from lean_trl.model.loader import new_model, save_model
from lean_trl.recipe import to_yaml

# Those of Qwen3; `tiny` is for tests. All have tied heads.
SHAPES = {
    "tiny": {"layers": 2, "hidden": 64, "mlp": 128, "heads": 4, "kv": 2, "dim": 16, "vocab": 512},
    "0.6b": {
        "layers": 28,
        "hidden": 1024,
        "mlp": 3072,
        "heads": 16,
        "kv": 8,
        "dim": 128,
        "vocab": 151936,
    },
    "1.7b": {
        "layers": 28,
        "hidden": 2048,
        "mlp": 6144,
        "heads": 16,
        "kv": 8,
        "dim": 128,
        "vocab": 151936,
    },
}
LONGEST = {"tiny": 128}  # else 4096


def config_of(shape: str) -> dict:
    """config.json of a shape."""
    size = SHAPES[shape]
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": size["layers"],
        "hidden_size": size["hidden"],
        "intermediate_size": size["mlp"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv"],
        "head_dim": size["dim"],
        "vocab_size": size["vocab"],
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
    }


def write(shape: str, folder: Path, dtype: str) -> Path:
    """Model, rows and recipe; returns the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(new_model(config_of(shape), 0, dtype="bfloat16"), folder / "model")
    for file in Path(builtin.model_folder()).glob("*"):
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, folder / "model")
    draw, longest = np.random.default_rng(0), LONGEST.get(shape, 4096)
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as rows:
        for length in draw.integers(longest // 16, longest + 1, 64):
            rows.write(json.dumps({"input_ids": draw.integers(5, 400, length).tolist()}) + "\n")
    recipe = {
        "method": "sft",
        "model": {"path": str(folder / "model"), "dtype": dtype},
        "data": {"path": str(folder / "rows.jsonl"), "max_length": longest},
        "train": {"batch_size": 8, "micro_batch_size": 4},
    }
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    return folder / "recipe.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", help="model.dtype of the recipe")
    options = parser.parse_args()
    print(write(options.shape, options.folder, options.dtype))


if __name__ == "__main__":
    main()
