"""Text from a model:  python scripts/generate.py MODEL "a prompt" ["another"] [--chat]

MODEL is a folder or hub id; "-" as prompt reads one prompt a line from standard input. --chat
renders each prompt as the user's turn of the model's chat template. Prints one JSON object a line.
"""

import argparse
import json
import sys


def main() -> None:
    try:
        answer(parse())
    except ValueError as error:
        sys.exit(f"{error}")


def answer(args: argparse.Namespace) -> None:
    # After parsing, so that --help and mistakes answer at once.
    from lean_trl.data.hub import resolve_model
    from lean_trl.data.tokenizer import load_tokenizer
    from lean_trl.model.generate import Sampling, generate
    from lean_trl.model.loader import load_model

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    folder = resolve_model(args.model)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype=args.dtype, device=args.device)
    texts = sys.stdin.read().splitlines() if args.prompt == ["-"] else args.prompt
    if args.chat:
        turns = [[{"role": "user", "content": text}] for text in texts]
        prompts = [tokenizer.encode_chat(turn, add_generation_prompt=True) for turn in turns]
    else:
        prompts = tokenizer.encode_batch(texts)
    for first in range(0, len(prompts), args.batch_size):
        batch = slice(first, first + args.batch_size)
        answers = generate(
            model,
            prompts[batch],
            max_tokens=args.max_tokens,
            stop_ids=tokenizer.stop_ids,
            sampling=sampling,
        )
        for text, ids in zip(texts[batch], answers, strict=True):
            line = {
                "prompt": text,
                "answer": tokenizer.decode(ids, skip_special_tokens=True),
                "ids": ids,
            }
            print(json.dumps(line, ensure_ascii=False), flush=True)


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected 1 or more")
    return number


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model")
    add("prompt", nargs="+")
    add("--chat", action="store_true", help="render prompts with the chat template")
    add("--max_tokens", type=count, default=128, help="ids per answer at most [128]")
    add("--temperature", type=float, default=0.0, help="0: the most likely token [0]")
    add("--top_k", type=int, default=0, help="draw from the k most likely; 0: all [0]")
    add("--top_p", type=float, default=1.0, help="draw from the fewest that hold this much [1]")
    add("--min_p", type=float, default=0.0, help="least probability beside the largest [0]")
    add("--seed", type=int, default=0)
    add("--batch_size", type=count, default=16, help="prompts at a time [16]")
    add("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    add("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
