"""A whole model from a base and an adapter:  python scripts/export.py ADAPTER OUT [--base BASE]

Merges in fp32, checks that logits stay the same, and writes OUT in Hugging Face's layout. ADAPTER
is a folder with adapter_config.json, such as output_dir/adapter of a run with peft; BASE a folder
or hub id [what adapter_config.json names].
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    args = parse()
    # After parsing, so that --help and mistakes answer at once.
    from lean_trl.data.hub import resolve_model
    from lean_trl.data.tokenizer import load_tokenizer
    from lean_trl.model.decoder import CausalLM
    from lean_trl.model.loader import DTYPES, load_model, save_model
    from lean_trl.model.value_head import RewardModel
    from lean_trl.techniques.merge import merge_adapter

    settings = json.loads((args.adapter / "adapter_config.json").read_text(encoding="utf-8"))
    base = args.base or settings["base_model_name_or_path"]
    if base is None:
        raise SystemExit(f"{args.adapter} names no base model: give --base")
    folder = resolve_model(base)
    kind = RewardModel if settings["task_type"] == "SEQ_CLS" else CausalLM
    model, change = merge_adapter(load_model(folder, dtype="float32", kind=kind), args.adapter)
    if change > args.tolerance:
        raise SystemExit(
            f"merging changes a logit by {change:.2g}, more than --tolerance {args.tolerance}"
        )
    dtype = DTYPES[args.dtype]
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    save_model(model, args.out, weights=weights)
    has_tokenizer = (args.adapter / "tokenizer.json").exists()
    load_tokenizer(args.adapter if has_tokenizer else folder).save(args.out)
    print(f"{args.out}: {len(weights)} tensors in {args.dtype}; logits within {change:.2g}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapter", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", help="folder or hub id [what adapter_config.json names]")
    parser.add_argument("--dtype", default="bfloat16", help="of what is written [bfloat16]")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="largest change of a logit [1e-3]"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
