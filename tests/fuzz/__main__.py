"""Draw random programs of MLA, and print those whose numbers the passes change.

python -m tests.fuzz masks --seeds 500
python -m tests.fuzz tensors --seeds 1 --first 217
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .check import KINDS, try_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument(
        "kind",
        choices=KINDS,
        help="what is random: masks, changes of tensors that keep shapes, or which of them are inputs",
    )
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    options = parser.parse_args()
    start = time.process_time()
    tried = try_seeds(options.kind, range(options.first, options.first + options.seeds), _tell)
    print(f"{len(tried.wrong)} wrong of {options.seeds} programs in {time.process_time() - start:.0f} s")
    _print_counts("attentions became", tried.paths)
    _print_counts("masks of those that were rewritten", tried.masks)
    return 1 if tried.wrong else 0


def _tell(line: str) -> None:
    print(line, flush=True)


def _print_counts(title: str, counts: Counter[str]) -> None:
    print(title)
    for name, count in counts.most_common():
        print(f"  {count:5}  {name}")


if __name__ == "__main__":
    sys.exit(main())
