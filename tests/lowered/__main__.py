"""Package many lowered programs with AOTInductor, run each in a process of its own, and say which are not right.

python -m tests.lowered --programs 200
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lowered", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mla-compile-lowered-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # before the processes import torch
        from .choices import SIZES, draw
        from .processes import outcomes

        total = wrong = 0
        start = time.perf_counter()
        programs = map(draw, range(options.first, options.first + options.programs))
        for program, trouble in outcomes(programs, options.processes):
            total += 1
            wrong += bool(trouble)
            seconds = time.perf_counter() - start
            print(f"{seconds:6.0f} s  {program.seed}: {trouble or 'right'}", flush=True)
            if trouble:
                print(f"    {program}", flush=True)
    print(f"{total - wrong} of {total} programs right at {SIZES} sizes each, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
