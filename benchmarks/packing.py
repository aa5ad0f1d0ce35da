"""What packing costs and how full the bins are.

    python benchmarks/packing.py [--sequences 1000000] [--peer]

CPU seconds of one pack() (least of three), bins, fill, and how full per-1000-row blocks would be.
--peer times the one-at-a-time algorithm (a segment tree over spaces, in Python as the peers have
it) on the same lengths.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

import numpy as np

from lean_trl.data.packing import pack


def draws(count: int) -> dict[str, tuple[np.ndarray, int]]:
    """Length distributions like those of instruction data, and the bin size for each."""
    rng = np.random.default_rng(0)

    def lognormal(median: float, sigma: float) -> np.ndarray:
        return np.maximum(rng.lognormal(np.log(median), sigma, count), 1).astype(np.int64)

    return {
        "lognormal, mean 500": (lognormal(363, 0.8), 2048),
        "lognormal, mean 500 ": (lognormal(363, 0.8), 8192),
        "lognormal, mean 1500": (lognormal(1324, 0.5), 2048),
        "gamma, mean 100": (np.maximum(rng.gamma(2, 50, count), 1).astype(np.int64), 2048),
        "uniform 200-1500": (rng.integers(200, 1500, count), 2048),
    }


def one_at_a_time(lengths: np.ndarray, max_length: int) -> int:
    """Bins of best-fit decreasing, one document at a time over a segment tree of spaces."""
    size = 1 << max_length.bit_length()
    tree = [0] * (2 * size)  # the largest space that has a bin, below each node
    waiting: list[deque[int]] = [deque() for _ in range(max_length + 1)]

    def mark(space: int, value: int) -> None:
        node = space + size
        tree[node] = value
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])

    bins = 0
    for length in np.sort(np.minimum(lengths, max_length))[::-1].tolist():
        # The least space >= length: climb from its leaf, then go down to the left.
        node = length + size
        if not tree[node]:
            while node > 1 and not (node % 2 == 0 and tree[node + 1]):
                node //= 2
            node = node + 1 if node > 1 else 0
            while node and node < size:
                node = 2 * node if tree[2 * node] else 2 * node + 1
        if node:
            space = node - size
            b = waiting[space].popleft()
            if not waiting[space]:
                mark(space, 0)
        else:
            space, b = max_length, bins
            bins += 1
        rest = space - length
        if rest:
            if not waiting[rest]:
                mark(rest, rest)
            waiting[rest].append(b)
    return bins


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()
    heads = f"{'lengths':22}{'bin':>6}{'strategy':>11}{'CPU s':>8}{'bins':>9}"
    print(f"{heads}{'fill':>9}{'per 1000':>10}")
    for name, (lengths, max_length) in draws(args.sequences).items():
        for strategy in ("bfd", "bfd_split", "wrapped"):
            seconds = []
            for _ in range(3):
                start = time.process_time()
                packing = pack(lengths, max_length, strategy)
                seconds.append(time.process_time() - start)
            bins = len(packing.bins)
            fill = packing.kept / (bins * max_length)
            sample = lengths[:200_000].reshape(-1, 1000)
            blocks = [pack(block, max_length, strategy) for block in sample]
            kept, many = sum(p.kept for p in blocks), sum(len(p.bins) for p in blocks)
            head = f"{name:22}{max_length:6}{strategy:>11}{min(seconds):8.3f}{bins:9}"
            print(f"{head}{fill:9.3%}{kept / (many * max_length):10.3%}")
        if args.peer:
            start = time.process_time()
            bins = one_at_a_time(lengths, max_length)
            took = time.process_time() - start
            print(f"{name:22}{max_length:6}{'one by one':>11}{took:8.3f}{bins:9}")


if __name__ == "__main__":
    main()
