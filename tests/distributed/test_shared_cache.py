"""A paged cache whose tokens are divided among ranks gives the same as a whole one, and each rank holds its share."""

from dataclasses import dataclass

import pytest
import torch
from torch._functorch import config as functorch_config
from torch.distributed.tensor import init_device_mesh

import mla_compile
from mla_compile import PagedLatentCache
from mla_compile.cache.shares import Shares
from mla_compile.inductor import codegen
from mla_compile.inductor.interpreted import interpreted
from tests.distributed.processes import in_processes

transformers = pytest.importorskip("transformers")

RANKS, PAGE = 2, 4
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
OPTIONS = {"max_new_tokens": 11, "min_new_tokens": 11, "pad_token_id": 0}
SEARCHES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 4},
}


def build(attention="sdpa", layers=2, heads=4):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    config = transformers.DeepseekV3Config(**SIZES | sizes)
    return transformers.DeepseekV3ForCausalLM._from_config(config, attn_implementation=attention).eval()


def prompt(padded):
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, : 4 * padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model, cache, padded, search):
    return model.generate(**prompt(padded), **OPTIONS, **SEARCHES[search], past_key_values=cache)


CASES = [
    ("greedy", True, None, "sdpa", None),
    ("greedy", False, 1, "eager", None),
    ("beams", True, 2, "sdpa", None),
    ("chunked prefill", False, None, "sdpa", None),
    ("greedy", True, None, "sdpa", torch.float8_e4m3fn),
]


def cases(mesh):
    for search, padded, interleave, attention, dtype in CASES:
        model = build(attention)
        cache = PagedLatentCache.of(model, 30, PAGE, dtype, mesh=mesh, interleave=interleave)
        whole = PagedLatentCache.of(model, 60, PAGE, dtype)
        tokens = [generated(model, of, padded, search) for of in (whole, cache)]
        used, length = cache.table.used, cache.get_seq_length()
        read = [of.table.read(1) for of in (whole, cache)]
        cache.reset()
        yield tokens, read, (length, used, cache.pool.pages, cache.pool.available)


def forked(mesh):
    """Fork a cache whose last page is full on the first rank and not on the last, continue both, and crop one.

    Returns the logits of each continuation, and those of the same tokens in one forward pass.
    """
    model, found = build(), []
    ids = torch.randint(1, 64, (1, 20), generator=torch.Generator().manual_seed(2))
    other_ids = ids.roll(7)
    for interleave in (1, PAGE):
        cache = PagedLatentCache.of(model, 30, PAGE, mesh=mesh, interleave=interleave)
        model(ids[:, :7], past_key_values=cache)
        fork = cache.fork()
        for of, then in ((cache, ids), (fork, other_ids), (cache, ids)):
            start = of.get_seq_length()
            logits = model(then[:, start : start + 3], past_key_values=of).logits
            before = torch.cat([ids[:, :7], then[:, 7:]], dim=1)[:, : start + 3]
            found.append((logits, model(before).logits[:, -3:]))
        cache.crop(-5)
        logits = model(other_ids[:, 8:10], past_key_values=cache).logits
        whole = torch.cat([ids[:, :8], other_ids[:, 8:10]], dim=1)
        found.append((logits, model(whole).logits[:, -2:]))
    return found


def refused(mesh):
    """The errors for a mesh of two dims, and for turns (`interleave`) that do not fill pages."""
    found = []
    two = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("a", "b"))
    for of, interleave in ((two, None), (mesh, 3), (mesh, 0)):
        try:
            PagedLatentCache.of(build(), 8, PAGE, mesh=of, interleave=interleave)
        except mla_compile.CacheMismatchError as error:
            found.append(str(error))
    return found


def all_of_them():
    mesh = init_device_mesh("cpu", (RANKS,))
    with torch.inference_mode():
        return list(cases(mesh)), forked(mesh), refused(mesh)


@pytest.fixture(scope="module")
def found():
    return in_processes(all_of_them, RANKS)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[" ".join(map(str, case)) for case in CASES])
def test_tokens_are_those_of_a_cache_that_has_them_all(found, index):
    for of_rank in found:
        (expected, tokens), (read, shared), (length, used, pages, available) = of_rank[0][index]
        assert torch.equal(tokens, expected)
        assert length == expected.shape[1] - 1
        torch.testing.assert_close(shared, read)
        assert used == -(-length // (RANKS * PAGE))  # pages of each rank: half, rounded up
        assert (pages, available) == (31, 30)  # one is spare


def test_forks_and_crops_are_apart(found):
    for of_rank in found:
        for logits, expected in of_rank[1]:
            torch.testing.assert_close(logits, expected)


def test_a_mesh_of_one_dimension_and_turns_that_fill_pages(found):
    assert found[0][2] == [
        "expected a mesh of one dimension, found 2: name one, as in mesh['cp']",
        "expected interleave to divide page_size 4, found 3",
        "expected interleave to divide page_size 4, found 0",
    ]


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_token_has_one_place(ranks, interleave):
    """In the pages of each rank, rows are filled one after the other."""
    position = torch.arange(5 * ranks * 4)
    rows = {}
    for rank in range(ranks):
        shares = Shares(ranks, rank, "group", interleave, 4, spare=0)
        own, row = shares.places(position)
        page = position // shares.page_tokens
        mine = (page * 4 + row)[own]
        assert torch.equal(mine, torch.arange(20))
        rows[rank] = position[own]
        assert torch.equal(rows[rank] // interleave % ranks, torch.full((20,), rank))
    assert torch.equal(torch.cat(list(rows.values())).sort().values, position)
    assert [shares.room(tokens) for tokens in (0, 1, 4 * ranks, 4 * ranks + 1)] == [0, 4 * ranks, 4 * ranks, 8 * ranks]


@dataclass(frozen=True)
class Compiled:
    """`mla.same_on_ranks`, and `mla.keys_stay`: whether keys stay where they are in prompts too."""

    same: str
    stay: bool
    interleave: int | None = None
    generates: bool = False
    """Whether `generate` makes the masks."""
    dtype: torch.dtype | None = None
    prompt: int = 9
    """Tokens of the prompt; with only 3, the second rank has none."""


COMPILED = [
    Compiled("queries", stay=True),
    Compiled("masks", stay=True, generates=True),
    Compiled("masks", stay=False, generates=True),
    Compiled("queries", stay=False, interleave=2),
    Compiled("queries", stay=True, dtype=torch.float8_e4m3fn, prompt=3),
]


def compiled_steps():
    """For each case, what is expected and found, what became of the attention, and the last graph's collectives."""
    mesh, found, modules = init_device_mesh("cpu", (RANKS,)), [], []

    def recorded(module, inputs, **named):
        modules.append(module)
        return interpreted(module, inputs, **named)

    codegen.compile_fx_inner = recorded
    with functorch_config.patch(enable_autograd_cache=False), torch.inference_mode():
        for case in COMPILED:
            torch._dynamo.reset()
            model, before = build(layers=1), len(mla_compile.reports())
            whole = PagedLatentCache.of(model, 60, PAGE, case.dtype)
            cache = PagedLatentCache.of(model, 30, PAGE, case.dtype, mesh=mesh, interleave=case.interleave)
            expected = continued(model, whole, case)
            options = {"mla.same_on_ranks": case.same, "mla.keys_stay": case.stay}
            model.compile(backend="mla", options=options, fullgraph=True)
            results = continued(model, cache, case)
            sites = [site for report in mla_compile.reports()[before:] for site in report.sites]
            collectives = [
                (node.target.__name__.partition(".")[0], [str(size) for size in node.meta["val"].shape])
                for node in modules[-1].graph.nodes
                if str(node.target).startswith("_c10d_functional.all")
            ]
            found.append((expected, results, [(site.path, site.reason) for site in sites], collectives))
    return found


def continued(model, cache, case):
    """Tokens of `generate` over a padded prompt, or the logits of a prompt and steps."""
    if case.generates:
        return generated(model, cache, True, "greedy")
    ids = torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(3))
    parts = [ids[:, : case.prompt], *ids[:, case.prompt :].split(1, dim=1)]
    return [model(part, past_key_values=cache).logits for part in parts]


OUTPUTS = [("all_gather_into_tensor", ["4", "1", "4", "36"])]
"""The outputs for both ranks' two sequences as bytes: 8 values and a log-sum-exp per head."""
QUERIES_AND_OUTPUTS = [
    ("all_gather_into_tensor", ["4", "1", "4", "20"]),
    ("all_to_all_single", ["2", "2", "1", "4", "68"]),
]
"""Queries in latent space, 16 + 4 wide, and the outputs there as bytes, with a log-sum-exp."""


@pytest.mark.slow
def test_compiled_each_rank_attends_to_its_own_pages():
    """No decode step gathers latents, of which each page adds some more."""
    for of_rank in in_processes(compiled_steps, RANKS):
        for case, (expected, results, sites, collectives) in zip(COMPILED, of_rank, strict=True):
            torch.testing.assert_close(results, expected)
            (_, prompt), *decodes = sites
            exchanged = "2 ranks attend to their own keys and exchange outputs"
            assert (
                exchanged if case.stay else ("gathers keys: that moves fewer bytes than exchanging outputs")
            ) in prompt
            assert {path for path, _ in decodes} == {"absorbed"}
            assert all(exchanged in reason for _, reason in decodes)
            assert decodes[-1][1].endswith("; reads the pages")
            assert collectives == (OUTPUTS if case.same == "queries" else QUERIES_AND_OUTPUTS)
