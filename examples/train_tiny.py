"""Train the example checkpoint: a 2M-parameter DeepSeek-V3 on the Python standard library.

The model is `transformers.DeepseekV3ForCausalLM` at toy size, with everything that makes the architecture what it is:
Multi-head Latent Attention with a low-rank query, a shared rope key, and a mixture of experts in the last layer. The
text is the standard library of the Python that runs this script: tests, generated tables and vendored packages are
left out, comments are dropped and docstrings are cut to their first line, so that the few weights go to code.

    python examples/train_tiny.py --bf16 --out examples/tiny-deepseek-v3

The first stage models the text. The second, short one teaches the model to leave loops, so that greedy decoding,
which backends are compared with, does not write the same line forever. The checkpoint in `tiny-deepseek-v3` had
1,645 steps of the first and about 240 of the second (in two parts of 90 and 150 seconds), on Python 3.11.

Needs `transformers`, `tokenizers`, `safetensors` and `tqdm`; no network, no GPU. `--steps` counts steps instead of
seconds, so that a slower machine takes as many steps.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

from library_text import encode, load_documents, train_tokenizer

PROMPTS = ("def ", "class Stack:\n    def __init__(self", "import os\n\ndef read_file(path):\n")
POLISH = 0.12  # Length of the second stage, in lengths of the first.
BAR = "{l_bar}{bar}| {n:.0f}/{total:.0f}{unit} [{elapsed}<{remaining}{postfix}]"


# --- model --------------------------------------------------------------------------------------------------------


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> DeepseekV3Config:
    """A small DeepSeek-V3: as there, keys and values of all heads (8 x 48 numbers) come from a far smaller latent."""
    return DeepseekV3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=64,
        kv_lora_rank=48,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=24,
        first_k_dense_replace=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=96,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        num_mtp_layers=0,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def routers(model: DeepseekV3ForCausalLM) -> list[torch.nn.Module]:
    """The routers of the mixture-of-experts layers, first layer first."""
    return [layer.mlp.gate for layer in model.model.layers[model.config.first_k_dense_replace :]]


@torch.no_grad()
def balance_experts(model: DeepseekV3ForCausalLM, router_logits: Sequence[Tensor], rate: float) -> None:
    """Raise the selection bias of experts that got too few tokens, lower the others' (DeepSeek-V3, section 2.1.2)."""
    for router, logits in zip(routers(model), router_logits, strict=True):
        chosen = (logits.sigmoid() + router.e_score_correction_bias).topk(router.top_k).indices
        load = torch.bincount(chosen.flatten(), minlength=router.num_experts).float()
        router.e_score_correction_bias += rate * (load.mean() - load).sign()


# --- training -----------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """How much of the training is done, counted in steps if their number is given and in seconds otherwise."""

    seconds: float
    steps: int | None
    step: int = 0
    started: float = 0.0

    @property
    def now(self) -> float:
        """Steps or seconds since the start."""
        return self.step if self.steps else time.monotonic() - self.started

    @property
    def total(self) -> float:
        """Steps or seconds in all."""
        return self.steps or self.seconds

    @property
    def done(self) -> float:
        """The part that is over, from 0 to 1."""
        return min(1.0, self.now / self.total)


def schedule(done: float, warmup: float = 0.02) -> float:
    """The factor of the learning rate: a linear warm-up from a twentieth, then half a cosine to zero."""
    if done < warmup:
        return 0.05 + 0.95 * done / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (done - warmup) / (1 - warmup))


def batches(tokens: Tensor, batch: int, context: int, seed: int) -> Iterator[Tensor]:
    """Endless batches `[batch, context]` of windows that start anywhere in the stream."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context)
    while True:
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
        yield tokens[starts + offsets]


def make_optimizers(model: DeepseekV3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the projection matrices, AdamW for the rest: embeddings, routers, norms and the stacks of experts.

    With its update scaled to AdamW's, Muon takes the same learning rate. After 120 steps of this model the training
    loss was 3.9, and 4.5 with AdamW alone.
    """
    projections, others, norms = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            norms.append(parameter)
        elif parameter.ndim == 2 and "_proj" in name:
            projections.append(parameter)
        else:
            others.append(parameter)
    adamw_groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(projections, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adamw_groups, betas=(0.9, 0.95), fused=True),
    ]


def fit(
    model: DeepseekV3ForCausalLM, next_loss: Callable[[], Tensor], lr: float, clock: Clock, save: Callable[[], None]
) -> None:
    """Optimize in place until the clock has run out, and save after each quarter."""
    optimizers = make_optimizers(model)
    next_loss().backward()  # Compiles; the clock starts after it.
    model.zero_grad()

    clock.started = time.monotonic()
    quarters = [0.25, 0.5, 0.75, 1.0]
    with tqdm(total=clock.total, unit="step" if clock.steps else "s", bar_format=BAR) as bar:
        while clock.done < 1:
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = lr * schedule(clock.done)
            loss = next_loss()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()

            clock.step += 1
            bar.update(min(clock.now, clock.total) - bar.n)
            bar.set_postfix(step=clock.step, loss=f"{loss.item():.3f}")
            if clock.done >= quarters[0]:
                quarters = [quarter for quarter in quarters if quarter > clock.done]
                save()


def train(model: DeepseekV3ForCausalLM, tokens: Tensor, args: argparse.Namespace, save: Callable[[], None]) -> None:
    """First stage: language modelling."""
    stream = batches(tokens, args.batch, args.context, args.seed)

    @torch.compile
    def forward(ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            output = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
        return output.loss, output.router_logits

    def next_loss() -> Tensor:
        loss, router_logits = forward(next(stream))
        balance_experts(model, router_logits, rate=1e-3)
        return loss

    fit(model, next_loss, args.lr, Clock(args.seconds, args.steps), save)


def repetitions(
    tokens: Tensor, lines: Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Windows `[batch, context]` that fall into a loop; where each loop starts, and its period, both `[batch, 1]`.

    One half repeats one to three whole lines (`lines` holds the positions of the line breaks), the other a few tokens
    from anywhere.
    """
    half = batch // 2

    def draw(low: int, high: int, rows: int) -> Tensor:
        return torch.randint(low, high, (rows, 1), generator=generator)

    # No loop starts in the first 64 tokens, which may be needed for the text before it.
    line = draw(64, len(lines) - 3, half)
    begin = torch.cat([lines[line], draw(64, len(tokens) - 64, batch - half)])
    period = torch.cat([lines[line + draw(1, 4, half)] - lines[line], draw(1, 9, batch - half)]).clamp(max=64)
    first = draw(1, 64, batch)
    position = torch.arange(context).expand(batch, -1)
    looped = torch.where(position < first, position, first + (position - first) % period)
    return tokens[begin - first + looped], first, period


def repetition_loss(logits: Tensor, ids: Tensor, first: Tensor, period: Tensor, decay: float = 0.5) -> Tensor:
    """Each round of a loop should find its tokens half as likely as the round before (DITTO, Xu et al. 2022, eq. 3).

    A small model that is decoded greedily repeats itself forever, as every repetition makes the next one more likely.
    """
    likely = logits[:, :-1].float().softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    position = torch.arange(1, ids.shape[1]).expand(len(ids), -1)
    before = likely.detach().gather(1, (position - period - 1).clamp(min=0))
    repeated = position >= first + period
    error = (likely - decay * before).abs()
    return -((1 - error).clamp(min=1e-6).log() * repeated).sum() / repeated.sum()


def polish(model: DeepseekV3ForCausalLM, tokens: Tensor, breaks: Tensor, args: argparse.Namespace) -> None:
    """Second, short stage: half of each batch teaches the model to leave loops, half not to forget the rest.

    `breaks` tells which token ids begin with a line break. The final weights lie between those before and those after
    this stage, which recovers half of what it costs in held-out loss.
    """
    before = copy.deepcopy(model.state_dict())
    half = args.batch // 2
    stream = batches(tokens, half, args.context, args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    lines = breaks[tokens].nonzero().flatten()

    @torch.compile
    def forward(text: Tensor, loops: Tensor, first: Tensor, period: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = model(input_ids=torch.cat([text, loops]), use_cache=False).logits
        modelling = F.cross_entropy(logits[:half, :-1].float().flatten(0, 1), text[:, 1:].flatten())
        return modelling + 2 * repetition_loss(logits[half:], loops, first, period)

    def next_loss() -> Tensor:
        return forward(next(stream), *repetitions(tokens, lines, half, args.context, generator))

    steps = math.ceil(POLISH * args.steps) if args.steps else None
    fit(model, next_loss, 0.25 * args.lr, Clock(POLISH * args.seconds, steps), save=lambda: None)
    after = model.state_dict()
    model.load_state_dict({name: before[name].lerp(after[name], 0.7) for name in before})


@torch.no_grad()
def evaluate(model: DeepseekV3ForCausalLM, tokens: Tensor, context: int) -> float:
    """Mean loss in nats per token over windows of `context` tokens that do not overlap."""
    windows = tokens[: len(tokens) // context * context].view(-1, context)
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss * len(ids) for ids in windows.split(16)]
    return sum(losses).item() / len(windows)


# --- checkpoint ---------------------------------------------------------------------------------------------------


def save_checkpoint(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer to `out`."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def continuation(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """The prompt and what the model greedily writes after it."""
    inputs = tokenizer(prompt, return_tensors="pt")
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=200, do_sample=False)[0])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a tiny DeepSeek-V3 on the Python standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny-deepseek-v3", help="where to save")
    parser.add_argument("--seconds", type=float, default=2000, help="how long the first stage lasts")
    parser.add_argument("--steps", type=int, help="how many optimizer steps it lasts, instead")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch")
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--lr", type=float, default=1e-2, help="highest learning rate")
    parser.add_argument("--vocab-size", type=int, default=1536, help="tokens in the vocabulary")
    parser.add_argument("--held-out", type=int, default=18, help="files kept out of the training text")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the file order and the batches")
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="matrix products in bfloat16; faster on a CPU that has them (avx512_bf16, amx_bf16), slower on others",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)

    documents = load_documents(Path(sysconfig.get_paths()["stdlib"]))
    random.Random(args.seed).shuffle(documents)
    held_out_documents, documents = documents[: args.held_out], documents[args.held_out :]
    tokenizer = train_tokenizer(documents, args.vocab_size)
    tokens = encode(tokenizer, documents, mean_piece=400, seed=args.seed)
    held_out = encode(tokenizer, held_out_documents, mean_piece=400, seed=args.seed)

    model = DeepseekV3ForCausalLM(tiny_config(tokenizer))
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} tokens from {len(documents)} files")

    train(model, tokens, args, save=lambda: save_checkpoint(model, tokenizer, args.out))
    breaks = torch.tensor(
        [text.startswith("\n") for text in tokenizer.batch_decode([[i] for i in range(len(tokenizer))])]
    )
    polish(model, encode(tokenizer, documents, mean_piece=100, seed=args.seed), breaks, args)
    save_checkpoint(model, tokenizer, args.out)

    saved = DeepseekV3ForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    print(f"held-out loss {evaluate(saved, held_out, args.context):.3f} nats per token")
    for prompt in PROMPTS:
        print("-" * 80, continuation(saved, tokenizer, prompt), sep="\n")


if __name__ == "__main__":
    main()
