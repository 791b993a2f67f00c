"""Layers of a paged cache that do not write alike in a step: what nobody has written is never returned."""

import pytest
import torch

from mla_compile import CacheMismatchError, OutOfPagesError, PagedLatentCache, PagePool

LAYERS, SIZE = 3, 2


class Written:
    """A cache, and what each of its layers was given."""

    def __init__(self, fixed=False, pages=32):
        pool = PagePool(LAYERS, 4, 2, pages, SIZE)
        self.cache = PagedLatentCache(pool, 8, batch=2) if fixed else PagedLatentCache(pool)
        self.latents = [torch.zeros(2, 1, 0, 4) for _ in range(LAYERS)]

    def step(self, *layers, count=1):
        for layer in layers:
            latent = torch.randn(2, 1, count, 4)
            found, _ = self.cache.update(latent, torch.randn(2, 1, count, 2), layer)
            self.latents[layer] = torch.cat([self.latents[layer], latent], dim=2)
            assert torch.equal(found[:, :, : self.latents[layer].shape[2]], self.latents[layer])


@pytest.fixture(params=[False, True], ids=["growing", "fixed"])
def written(request):
    return Written(request.param)


def test_any_layer_may_begin_a_step(written):
    for layers in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        written.step(*layers)
    assert int(written.cache.get_seq_length()) == 3


@pytest.mark.parametrize(
    ("layer", "count", "message"),
    [
        (1, 3, "expected the 2 tokens that layer 1 lacks, found 3"),
        (2, 1, "expected the 2 tokens that layer 2 lacks, found 1"),
        (3, 2, "expected a layer from 0 to 2, found 3"),
    ],
)
def test_layers_write_as_many_tokens_as_the_one_that_began(written, layer, count, message):
    written.step(0, 1, 2, count=3)
    written.step(0, count=2)
    with pytest.raises(CacheMismatchError, match=message):
        written.step(layer, count=count)
    written.step(1, 2, count=2)
    written.step(0, 1, 2)


@pytest.mark.parametrize("end", ["another step", "fork", "reorder"])
def test_a_layer_that_was_left_out_of_a_step_cannot_go_on(written, end):
    written.step(0, 1, 2, count=SIZE)
    written.step(0, 2, count=SIZE)
    caches = [written.cache]
    if end == "another step":
        written.step(0)
    elif end == "fork":
        caches.append(written.cache.fork())
    else:
        written.cache.reorder_cache(torch.tensor([0, 0]))
    for cache in caches:
        with pytest.raises(CacheMismatchError, match="tokens of layer 1 in each step, found none in an earlier one"):
            cache.update(torch.ones(2, 1, SIZE, 4), torch.ones(2, 1, SIZE, 2), 1)


def test_a_cache_that_is_reset_begins_anew():
    written = Written()
    written.step(0)
    written.cache.reset()
    written.latents[0] = written.latents[0][:, :, :0]
    written.step(1, 0, 2)


def test_layers_that_are_never_written_do_not_matter(written):
    for _ in range(3):
        written.step(0, 2)


def test_tokens_that_are_cropped_are_lacked_no_more(written):
    written.step(0, 1, 2, count=4)
    written.step(0, count=3)
    written.cache.crop(-2)
    written.latents[0] = written.latents[0][:, :, :5]
    written.step(1, 2)
    written.step(0, 1, 2)


def test_a_first_step_that_is_refused_leaves_the_batch_open():
    written = Written(pages=2)
    with pytest.raises(OutOfPagesError):
        written.step(0, count=SIZE + 1)
    latent, _ = written.cache.update(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 4, 2), 0)
    assert latent.shape == (1, 1, 4, 4)
