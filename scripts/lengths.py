"""How long are my rows, and which max_length?  python scripts/lengths.py DATA --tokenizer MODEL

DATA is a file, a folder or a hub dataset id; MODEL a folder or hub id with a tokenizer. Prints the
distribution of lengths and, for some values of max_length, the share of rows and tokens that it
cuts, of rows that it leaves with nothing to train on, of padding, and how full packed bins are.
--html writes a page with a slider, --png a picture.
"""

import argparse
import sys
from pathlib import Path

KINDS = ("sft", "preference", "reward", "unpaired", "prompt")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--tokenizer", required=True, metavar="MODEL")
    parser.add_argument("--kind", choices=KINDS, help="default: by the first row's columns")
    parser.add_argument("--split")
    parser.add_argument("--revision")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--columns", type=yaml_map, help="as data.columns: '{prompt: question}'")
    parser.add_argument("--assistant-only-loss", action="store_true")
    parser.add_argument("--chat-template")
    parser.add_argument(
        "--max-length", type=int, nargs="+", help="default: some that suit the data"
    )
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--cache-dir", help="of prepared rows; default: as data.cache_dir")
    return parser.parse_args()


def yaml_map(text: str) -> dict:
    import yaml

    return yaml.safe_load(text)


def main() -> None:
    try:
        report(parse())
    except ValueError as error:
        sys.exit(f"{error}")


def report(args: argparse.Namespace) -> None:
    # After parsing, so that --help and mistakes answer at once.
    from lean_trl.data import lengths as tool
    from lean_trl.data.drafts import Reading
    from lean_trl.data.examples import kind_of
    from lean_trl.data.hub import cache_folder
    from lean_trl.data.prepare import prepare
    from lean_trl.data.rows import read_rows
    from lean_trl.data.sources import resolve_sources
    from lean_trl.data.tokenizer import load_tokenizer

    sources = resolve_sources(args.data, args.split, args.revision)
    first = next(iter(read_rows(sources[0].files[0])), {})
    kind = args.kind or kind_of({**first, **(args.columns or {})})
    reading = Reading(
        kind, args.text_column, args.columns, assistant_only_loss=args.assistant_only_loss
    )
    tokenizer = load_tokenizer(args.tokenizer, chat_template=args.chat_template)
    prepared = prepare(sources, reading, tokenizer, cache_folder(args.cache_dir))
    lengths = tool.measure(prepared.store, kind)
    limits = args.max_length or tool.candidates(lengths)
    costs = [tool.cost_of(lengths, limit, args.micro_batch_size) for limit in limits]
    print(*prepared.drops.lines(prepared.rows), sep="\n")
    print(tool.table(lengths, costs, args.micro_batch_size))
    for name, values in lengths.series.items():
        print(f"\n{name}\n{tool.histogram(values)}")
    if args.html:
        tool.write_page(lengths, args.micro_batch_size, args.html, f"Lengths of {args.data}")
    if args.png:
        tool.write_image(lengths, args.png, f"Lengths of {args.data}")


if __name__ == "__main__":
    main()
