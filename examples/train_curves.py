"""Train the example checkpoint's model from new weights, with stock Inductor and with `mla`: one loss, two compilers.

    python examples/train_curves.py --steps 300 --plot out/train-curves.svg

Both start from the same weights and see the same batches of the standard library's text. Their losses differ by
rounding, which grows as training goes on. The script prints the largest difference, and what each run kept for the
backward. `--recompute` sets `mla.recompute`. Needs what `train_tiny.py` needs, and matplotlib for `--plot`.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, DeepseekV3ForCausalLM

import mla_compile
from library_text import encode, load_documents
from mla_compile.bench.memory import kept_for_backward
from train_tiny import batches, schedule

CHECKPOINT = Path(__file__).parent / "tiny-deepseek-v3"
DOCUMENTS = 150  # Files of text: more than a few hundred steps use.
WARMUP = 0.1  # Share of all steps; a short run needs a larger share than a long one.


@dataclass
class Run:
    """One compiler's training: the model, its optimizer, and what was measured."""

    backend: str
    step: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    saved_bytes: int = 0

    def train(self, ids: Tensor, rate: float) -> None:
        """Take one step on a batch `[B, S]` at a learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        start = time.perf_counter()
        loss = self.step(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.step.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def measure_saved(self, ids: Tensor) -> None:
        """Record how many bytes the forward of a batch keeps for its backward, besides the weights."""
        self.saved_bytes = kept_for_backward(
            lambda: self.step(input_ids=ids, labels=ids, use_cache=False).loss, self.step.parameters()
        )


def compiled(model: DeepseekV3ForCausalLM, backend: str, lr: float, options: dict[str, object] | None) -> Run:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    model.compile(backend=backend, dynamic=False, options=options)
    return Run(backend, model, optimizer)


def plot(runs: list[Run], path: Path) -> None:
    """Draw both curves in one figure. The suffix of `path` decides its format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for run, style in zip(runs, ("-", "--"), strict=True):
        axes.plot(run.losses, style, label=f'backend="{run.backend}"')
    axes.set(xlabel="steps", ylabel="loss, nats a token", title="tiny-deepseek-v3 from new weights, fp32")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--context", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--recompute", default="nothing", help="the option mla.recompute")
    parser.add_argument("--plot", type=Path, help="write the loss curves to this file")
    args = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    documents = load_documents(Path(sysconfig.get_paths()["stdlib"]))[:DOCUMENTS]
    tokens = encode(tokenizer, documents, mean_piece=400, seed=0)
    model = DeepseekV3ForCausalLM(AutoConfig.from_pretrained(CHECKPOINT)).float().train()
    runs = [
        compiled(model, "inductor", args.lr, None),
        compiled(model, "mla", args.lr, {"mla.recompute": args.recompute}),
    ]
    supply = batches(tokens, args.batch, args.context, seed=0)
    for step in range(args.steps):
        ids = next(supply)
        for run in runs:
            run.train(ids, args.lr * schedule((step + 1) / args.steps, WARMUP))
        if (step + 1) % max(args.steps // 10, 1) == 0:
            print(f"{step + 1:5}  " + "  ".join(f"{run.backend} {run.losses[-1]:.6f}" for run in runs), flush=True)

    largest = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))
    print(f"largest difference of the losses of a step: {largest:.2g}")
    for run in runs:
        run.measure_saved(ids)
        median = 1000 * sorted(run.seconds)[len(run.seconds) // 2]
        kept = run.saved_bytes / ids.numel()
        print(f"{run.backend:9} last loss {run.losses[-1]:.4f}, {median:.0f} ms a step, {kept:.0f} bytes a token kept")
    rewritten = sum(report.rewritten for report in mla_compile.reports())
    print(f"attentions that mla rewrote: {rewritten} of {model.config.num_hidden_layers} layers")
    if args.plot is not None:
        plot(runs, args.plot)
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
