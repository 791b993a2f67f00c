"""A day of a chat: prompts of any length, batches of any size, padded and not, in eight compilations at most."""

import random
import warnings

import pytest
import torch

import mla_compile

transformers = pytest.importorskip("transformers")

TURNS = 20
TOKENS = 3
BATCHES = (1, 2, 3, 4, 8)
LENGTHS = (2, 3, 5, 17, 40, 100)


def small():
    """DeepSeek-V3 of one layer."""
    torch.manual_seed(0)
    widths = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        **widths,
        **experts,
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


def turns(seed):
    """Token ids and attention mask of each turn. All five batch sizes occur, and some turns are padded."""
    source = random.Random(seed)
    for turn in range(TURNS):
        batch, length = BATCHES[(turn * 3 + seed) % len(BATCHES)], source.choice(LENGTHS)
        ids, seen = torch.randint(1, 64, (batch, length)), torch.ones(batch, length, dtype=torch.int64)
        if batch > 1 and source.random() < 0.5:
            for row in range(1, batch):
                seen[row, : source.randrange(length)] = 0
        yield ids, seen


def reply(model, ids, seen):
    greedy = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=seen, **greedy)


@pytest.mark.slow
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_day_takes_eight_compilations_at_most(seed):
    model = small()
    day = list(turns(seed))
    expected = [reply(model, *turn) for turn in day]
    model.compile(backend="mla")
    with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        warnings.filterwarnings("ignore", message="variant 8 of wrapper of DeepseekV3ForCausalLM")
        for turn, tokens in zip(day, expected, strict=True):
            assert torch.equal(reply(model, *turn), tokens)
    assert len(mla_compile.reports()) <= 8
    assert all(report.rewritten == 1 for report in mla_compile.reports())
