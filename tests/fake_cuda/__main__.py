"""Lower steps for a GPU and print what it would run, one JSON object per step.

python -m tests.fake_cuda h100 '{"model": "v3", "cache": "static", "batch": 64, "tokens": 1, "layers": 2}' ...
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
from torch._inductor import config

from .cases import Case, call_of
from .lowering import lower
from .pretend import present


def main() -> None:
    gpu, *cases = sys.argv[1:]
    with present(gpu):
        for argument in cases:
            torch.compiler.reset()
            case = Case(**json.loads(argument))
            with config.patch(freezing=case.frozen):
                found = lower(call_of(case))
            print(json.dumps(dataclasses.asdict(found)), flush=True)


if __name__ == "__main__":
    main()
