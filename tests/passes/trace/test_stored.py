"""What a form says about how elements are stored follows changes of its axes, or is forgotten, but is never wrong."""

import pytest
import torch
from torch import fx

from mla_compile.passes.trace.trace import Trace
from tests.passes.graphs import capture
from tests.passes.meaning import check_lookups

POOL, TABLE = torch.randn(12, 4, 6), torch.randint(-12, 12, (4, 3))

KEPT = {
    "keys from the first on": lambda keys: keys[:, :7],
    "a sequence alone": lambda keys: keys[1],
    "every second sequence": lambda keys: keys[::2],
    "sequences in two dimensions": lambda keys: keys.view(2, 2, *keys.shape[1:]),
    "columns": lambda keys: keys[..., 2:5],
    "columns in groups": lambda keys: keys.unflatten(-1, (3, 2)),
    "the other way round": lambda keys: keys.transpose(1, 2),
    "twice as much, in float64": lambda keys: keys.double(),
}
FORGOTTEN = {
    "keys from the middle": lambda keys: keys[:, 3:7],
    "every second key": lambda keys: keys[:, ::2],
    "one key": lambda keys: keys[:, 0],
    "pages apart again": lambda keys: keys.unflatten(1, (3, 4)),
    "keys and columns run together": lambda keys: keys.flatten(1).view(4, 6, 12),
}


def flat_keys(change):
    return lambda pool, table: change(pool[table].flatten(1, 2))


def of_the_result(module: fx.GraphModule):
    (result,) = module.graph.find_nodes(op="output")[0].all_input_nodes
    return Trace(module.graph)[result].term.stored


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
def test_a_lookup_follows_what_happens_to_its_keys(change):
    module = capture(flat_keys(change), POOL, TABLE)
    check_lookups(module, POOL, TABLE)
    assert of_the_result(module).flat is not None


@pytest.mark.parametrize("change", FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_lookup_of_other_keys_than_the_first_is_forgotten(change):
    module = capture(flat_keys(change), POOL, TABLE)
    check_lookups(module, POOL, TABLE)
    assert of_the_result(module) is None


def test_a_lookup_whose_pages_are_not_flattened_is_not_flat():
    """Until pages and rows are flattened to keys, any axis of a lookup may change."""
    module = capture(lambda pool, table: pool[table][:, 1:, :2], POOL, TABLE)
    assert check_lookups(module, POOL, TABLE)
    assert of_the_result(module).flat is None


def test_the_axes_that_a_lookup_binds_are_in_no_form():
    """The same pages are looked up twice, once flattened: neither use changes what is said of the other."""
    module = capture(lambda pool, table: (pool[table].flatten(1, 2), pool[table].transpose(1, 2)), POOL, TABLE)
    check_lookups(module, POOL, TABLE)
    forms = [Trace(module.graph)[node] for node in module.graph.nodes if node.op == "call_function"]
    for form in forms:
        stored, own = form.term.stored, {axis for dim in form.dims for axis in dim}
        assert stored is None or stored.entry not in own
        assert stored is None or stored.flat is None or own.isdisjoint({stored.flat.page, stored.flat.row})
