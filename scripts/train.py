"""Train a model:  torchrun scripts/train.py [recipe.yaml] [--section.key value ...]

Without a recipe, a method, a model or data: recipes/sft.yaml, SFT of the built-in tiny model on
built-in arithmetic, about two minutes on two CPU cores. Without torchrun (`python
scripts/train.py`) it is one process; more ranks: torchrun --nproc-per-node N.
"""

import sys
from pathlib import Path

from lean_trl.config import config_from_command_line

DEFAULT = Path(__file__).parents[1] / "recipes" / "sft.yaml"
# Whoever names one of these has a run of their own in mind, with our plain defaults.
OWN = ("--method", "--model.path", "--data.path")


def main() -> None:
    arguments = sys.argv[1:]
    own = any(argument.split("=")[0] in OWN for argument in arguments)
    if not own and (not arguments or arguments[0].startswith("--")):
        arguments = [str(DEFAULT), *arguments]
    config = config_from_command_line(__doc__, arguments)
    from lean_trl.train.loop import train  # torch only after the settings are known to be right

    train(config)


if __name__ == "__main__":
    main()
