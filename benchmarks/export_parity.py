"""An exported model against transformers: the same weights, the same logits.

    python benchmarks/export_parity.py outputs/smollm2_gsm8k/model [--tokens 64]

Loads the folder with lean_trl and transformers ([parity] extra) in fp32 and prints whether every
weight is bit-equal, the largest difference of the logits, and both libraries' error against
transformers in fp64.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from lean_trl import Example, build_batch, load_model
from lean_trl.data.tokenizer import load_tokenizer

TEXT = (
    "A farmer keeps 12 hens. Each hen lays 5 eggs a week, and he sells a dozen for 3 dollars. "
    "How much does he earn in 4 weeks? He has 12 * 5 = 60 eggs a week, which is 60 / 12 = 5 dozens."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the text that is scored")
    options = parser.parse_args()
    ids = load_tokenizer(options.folder).encode(TEXT)[: options.tokens]
    ours = load_model(options.folder)
    theirs = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    names = dict(theirs.named_parameters())
    equal = [torch.equal(p, names[name]) for name, p in ours.named_parameters()]
    print(f"weights bit-equal: {sum(equal)} of {len(equal)}")
    with torch.no_grad():
        batch = build_batch([Example(ids)])
        our_logits = ours.logits(ours.hidden(batch)).double()
        inputs = torch.tensor([ids])
        their_logits = theirs(inputs).logits[0].double()
        exact = theirs.double()(inputs).logits[0]
    print(f"logits, max abs difference: {(our_logits - their_logits).abs().max():.2e}")
    our_error, their_error = (
        (x - exact).square().mean().sqrt() for x in (our_logits, their_logits)
    )
    print(
        f"rms error against fp64: ours {our_error:.3e}, transformers {their_error:.3e}, "
        f"ratio {our_error / their_error:.2f}"
    )


if __name__ == "__main__":
    main()
