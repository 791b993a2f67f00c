"""Draw spellings of MLA, and print how many are rewritten and why the others are not.

python -m tests.spellings --seeds 2000
python -m tests.spellings --seeds 400 --train
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections import Counter

import torch

from .checks import check
from .choices import OWN_ROPES, TWO_LATENTS, draw
from .training import check_training


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spellings", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--train", action="store_true", help="as graphs that need gradients, each of which is checked")
    parser.add_argument("--each", action="store_true", help="a line for every one that is not rewritten")
    options = parser.parse_args()
    rewritten = total = spoiled = absorbed = others = 0
    wrong: list[str] = []
    reasons: Counter[str] = Counter()
    start = time.process_time()
    for seed in range(options.first, options.first + options.seeds):
        spelling = draw(seed)
        try:
            with torch.no_grad():
                outcome = check_training(spelling, seed) if options.train else check(spelling, seed)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{seed}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})")
            print(wrong[-1], flush=True)
            continue
        if spelling.spoiled in OWN_ROPES + TWO_LATENTS:
            others += 1
            absorbed += outcome.rewritten
            continue
        if spelling.spoiled != "no":
            spoiled += 1
            if outcome.rewritten:
                wrong.append(f"{seed}: {spelling.spoiled}, and rewritten")
                print(wrong[-1], flush=True)
            continue
        total += 1
        rewritten += outcome.rewritten
        if not outcome.rewritten:
            reasons[re.sub(r"`\w+` \((\w+)[^)]*\)", r"`\1`", outcome.reason)] += 1
            if options.each:
                print(f"{seed}: {outcome.reason}\n    {spelling}", flush=True)
    seconds = time.process_time() - start
    print(f"{rewritten} of {total} spellings rewritten ({100 * rewritten / max(total, 1):.2f} %) in {seconds:.0f} s")
    print(f"{absorbed} of {others} with two latents, or a rope key a head, rewritten")
    print(f"{spoiled} that are no MLA stayed as they are" if not wrong else f"{len(wrong)} wrong")
    for reason, count in reasons.most_common():
        print(f"  {count:4}  {reason}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
