"""Export the trained DeepSeek-V3 of `examples/` to a file that runs without Python, for any prompt and cache length.

Run: python examples/aot/export.py out/aot      writes model.pt2, libmla.so and pieces.txt, which generate.cpp reads
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

import mla_compile

CHECKPOINT = Path(__file__).parent.parent / "tiny-deepseek-v3"


class Step(nn.Module):
    """A model as a function of tokens and the cache before them, a form that `torch.export` accepts."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, latents: Tensor, k_ropes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run `ids` [B, Sq] after a cache of T tokens: latents [layers, B, T, L] and rope keys [layers, B, T, R].

        Returns the last token's logits [B, vocabulary], and the cache of T + Sq tokens.
        """
        cache = DynamicCache(config=self.model.config)
        for layer, (latent, k_rope) in enumerate(zip(latents, k_ropes, strict=True)):
            cache.update(latent[:, None], k_rope[:, None], layer)
        logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits, *(
            torch.stack([getattr(layer, name)[:, 0] for layer in cache.layers]) for name in ("keys", "values")
        )


def export(model: PreTrainedModel) -> torch.export.ExportedProgram:
    """The exported program, for 1 to 512 tokens after a cache of 0 to 512."""
    config = model.config
    tokens, context = Dim("Sq", min=1, max=512), Dim("T", min=0, max=512)
    cache = (
        torch.zeros(config.num_hidden_layers, 1, 8, width) for width in (config.kv_lora_rank, config.qk_rope_head_dim)
    )
    example = torch.zeros(1, 4, dtype=torch.int64), *cache
    return torch.export.export(Step(model), example, dynamic_shapes=({1: tokens}, {2: context}, {2: context}))


def write_pieces(path: Path) -> None:
    """Write the bytes of each token in hexadecimal, one per line: all that generating text needs of a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    lines = [tokenizer.decode([token]).encode().hex() for token in range(len(tokenizer))]
    path.write_text("\n".join(lines) + "\n")


@torch.no_grad()
def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Experts as products: the default on CPU is a Python op of transformers, which C++ cannot call.
    model = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, experts_implementation="batched_mm"
    ).eval()
    program = mla_compile.rewrite(export(model), options={"mla.strict": True})
    print(mla_compile.last_report())
    lowered = mla_compile.lower(program, kernels=True)  # without kernels it needs no library
    mla_compile.build_library(folder / "libmla.so", [torch.float32])
    package = torch._inductor.aoti_compile_and_package(lowered, package_path=str(folder / "model.pt2"))
    write_pieces(folder / "pieces.txt")
    prompt = AutoTokenizer.from_pretrained(CHECKPOINT)("import os\n\ndef read_file(path):\n")["input_ids"]
    print("generate", package, folder / "libmla.so", folder / "pieces.txt", 60, *prompt)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/aot"))
