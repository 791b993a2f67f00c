"""Keys that are gathered from ranks stay where they are: each rank attends to its own, and outputs are exchanged."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor.debug import CommDebugMode

import mla_compile
import mla_compile.kernels.register
from mla_compile.cost import Device
from mla_compile.passes.pipeline import Pipeline
from tests.distributed import naive
from tests.distributed.processes import in_processes
from tests.errors import assert_as_close_as_eager

B, T = 3, 96
SPELLINGS = ("along_tokens", "tokens_first", "into_tensor", "list_of_tensors", "redistributed")
LAYOUTS = ("along_tokens", "by_token", "by_page")


def collectives_of(graph):
    """Of each collective of a graph its name and the bytes that a rank receives of others."""
    found = []
    for node in graph.nodes:
        if getattr(node.target, "namespace", None) == "_c10d_functional" and "wait" not in str(node.target):
            ranks = dist.get_world_size()
            found.append((node.target._opname, node.meta["val"].nbytes * (ranks - 1) // ranks))
    return found


def rewritten(function, same, inputs):
    """What the passes make of a function: outcome, collectives in the graph, those that a run has, and its result."""
    seen = {}

    def compiler(module, _):
        (result,) = Pipeline(Device("an example", 1e12, 1e11), same_on_ranks=same)(module)
        seen["outcome"], seen["graph"] = (result.outcome.path, result.outcome.reason), collectives_of(module.graph)

        def run(*arguments):
            with CommDebugMode() as counted:
                outputs = module(*arguments)
            seen["counted"] = sorted((str(op), count) for op, count in counted.get_comm_counts().items())
            return outputs

        return run

    torch._dynamo.reset()
    seen["result"] = torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*inputs)
    return seen


def share_out(gather, seed, B, Sq, T, dtype):
    """This rank's share of the keys, and what it attends with: its own queries where seeds differ."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _, _, latent, k_rope = naive.make(0, ranks, B, Sq, T, dtype)
    q, kv_b, _, _ = naive.make(seed, ranks, B, Sq, T, dtype)
    own = naive.place(gather, T, rank, ranks)
    return (q, latent[:, own], k_rope[:, own], kv_b), (latent, k_rope)


@torch.no_grad()
def attend_in_shares(spelling, same, Sq=1, mask="none", dtype=torch.float64, T=T):
    """On one rank: what the passes make, what torch.compile with the backend does, eager, and the exact result."""
    gather = getattr(naive, spelling)
    seed = 1 if same == "queries" else 1 + dist.get_rank()
    (q, latent, k_rope, kv_b), whole = share_out(gather, seed, B, Sq, T, dtype)
    lengths = torch.tensor([T, T // 2 + 1, Sq])
    given = (lengths,) if mask == "lengths" else ()

    def function(q, latent, k_rope, kv_b, *given):
        hidden = {
            "none": lambda: None,
            "causal": lambda: naive.causal(Sq, T),
            "lengths": lambda: naive.up_to(*given, Sq, T),
        }[mask]()
        return naive.attend(q, gather(latent), gather(k_rope), kv_b, hidden)

    inputs = q, latent, k_rope, kv_b, *given
    found = rewritten(function, same, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="mla", options={"mla.same_on_ranks": same, "mla.strict": True})(*inputs)
    hidden = {"none": None, "causal": naive.causal(Sq, T), "lengths": naive.up_to(lengths, Sq, T)}[mask]
    exact = naive.attend(*(t.double() for t in (q, *whole, kv_b)), hidden)
    site = mla_compile.last_report().sites[0]
    return found | {"compiled": compiled, "eager": function(*inputs), "exact": exact, "site": (site.path, site.reason)}


def assert_right(found, ranks=2):
    words = f"{ranks} ranks attend to their own keys and exchange outputs"
    for result in ("result", "compiled"):
        if found["exact"].dtype == found[result].dtype:
            torch.testing.assert_close(found[result], found["exact"], rtol=0, atol=1e-12)
        else:
            assert_as_close_as_eager(found[result], found["eager"], found["exact"])
    for path, reason in (found["outcome"], found["site"]):
        assert path == "absorbed"
        assert words in reason


def bytes_of_gathered_queries(ranks, B, Sq, element):
    """What a rank receives of others' queries, and of what others have for its own."""
    N, L, R = naive.N, naive.L, naive.R
    queries = (ranks - 1) * B * Sq * N * (L + R) * element
    return [("all_gather_into_tensor", queries), ("all_to_all_single", (ranks - 1) * B * Sq * N * (L * element + 4))]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_any_spelling_of_the_gather(spelling):
    for found in in_processes(attend_in_shares, 2, spelling, "nothing"):
        assert_right(found)
        assert found["graph"] == bytes_of_gathered_queries(2, B, 1, 8)


def test_collectives_are_those_of_the_formula():
    for found in in_processes(attend_in_shares, 2, "along_tokens", "queries"):
        assert_right(found)
        assert found["graph"] == [("all_gather_into_tensor", B * naive.N * (naive.V * 8 + 4))]
        assert found["counted"] == [("c10d_functional.all_gather_into_tensor", 1)]


@pytest.mark.parametrize("mask", ["causal", "lengths"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("Sq", [1, 3])
def test_masks_are_told_by_position(layout, mask, Sq):
    """Of the last sequence's few tokens some ranks have none."""
    for found in in_processes(attend_in_shares, 2, layout, "masks", Sq, mask):
        assert_right(found)
