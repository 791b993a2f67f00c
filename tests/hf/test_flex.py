"""DeepSeek-V3 with flex_attention, whose masks transformers gives as functions."""

import pytest
import torch

import mla_compile

transformers = pytest.importorskip("transformers")


def model(layers):
    torch.manual_seed(0)
    widths = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.DeepseekV3Config(**widths, **sizes, num_hidden_layers=layers, first_k_dense_replace=2)
    return transformers.DeepseekV3ForCausalLM(config).eval()


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(("padding", "layers"), [pytest.param(0, 2, marks=pytest.mark.slow), (4, 1)])
def test_logits_are_those_of_eager_attention(padding, layers):
    ids, seen = torch.randint(1, 64, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    seen[1, :padding] = 0
    expected = model(layers).double()(ids, attention_mask=seen).logits
    flexible = model(layers)
    flexible.set_attn_implementation("flex_attention")
    flexible.compile(backend="mla")
    logits = flexible(ids, attention_mask=seen).logits.double()
    torch.testing.assert_close(logits[:, padding:], expected[:, padding:], rtol=1e-4, atol=1e-5)
    assert sum(report.rewritten for report in mla_compile.reports()) == layers


@pytest.mark.slow
@pytest.mark.usefixtures("without_codegen")
def test_tokens_are_those_of_eager_attention():
    """In a step, the mask's function is given a number of tokens that is a symbol."""
    ids, settings = torch.randint(1, 64, (2, 7)), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    flexible, eager = model(1), model(1)
    flexible.set_attn_implementation("flex_attention")
    flexible.compile(backend="mla")
    assert torch.equal(flexible.generate(ids, **settings), eager.generate(ids, **settings))
    sites = [site for report in mla_compile.reports() for site in report.sites]
    assert len(sites) >= 2
    assert all(site.rewritten for site in sites)
