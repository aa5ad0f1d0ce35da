"""Write the files behind the built-in default again.

python scripts/make_builtin.py                  lean_trl/builtin/model: config, tokenizer, template
python scripts/make_builtin.py --data FOLDER    the dataset, one parquet file a split, to look at
"""

import argparse
from pathlib import Path

from lean_trl.builtin import model_folder
from lean_trl.builtin.dataset import write_dataset
from lean_trl.builtin.make import write_model_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder to write the dataset to")
    parser.add_argument("--seed", type=int, default=0, help="of the dataset [0]")
    arguments = parser.parse_args()
    if arguments.data is None:
        write_model_folder(model_folder())
    else:
        arguments.data.mkdir(parents=True, exist_ok=True)
        write_dataset(arguments.data, arguments.seed)
    print(f"written: {arguments.data or model_folder()}")


if __name__ == "__main__":
    main()
