"""`PagedLatentCache`: a page pool and block table as the `Cache` of transformers' `generate`, or of a custom model."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import CacheMismatchError, OutOfPagesError
from .fixed_table import FixedTable
from .indexer_keys import IndexerKeys
from .model_layers import is_latents, others_than_kept, own_layers, sizes_of
from .pool import PagePool, check_count
from .pools import pool_in
from .shared_table import SharedTable
from .shares import Shares
from .steps import Steps
from .table import BlockTable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Base = object
else:
    try:
        from transformers.cache_utils import Cache as Base
    except ImportError:  # the cache also serves models of other libraries that call `update`
        Base = object


class PagedLatentCache(Base):
    """A batch of sequences in a page pool, for models that cache one latent and one rope key per token.

    It can be passed to `model.generate(**inputs, past_key_values=cache)` and `model(ids, past_key_values=cache)` like a
    `DynamicCache`, eager and compiled. All sequences of a batch have the same length, including padding tokens, which
    the attention mask hides, as usual in transformers. It is for inference: what is read from the pages has no
    gradients.

    Args: pool, with one layer for each layer of the model that caches latents; max_pages, the largest number per
    sequence (default: all); shares, if tokens are split over ranks, each with a pool of as many pages; batch, if that
    many sequences get max_pages each at construction and keep their length as a number on the device; layers,
    transformers' own cache layers for those of the model that cache something else (states, a window), and None for
    each other layer.
    Raises: CacheMismatchError for a batch without max_pages or with shares, and for `layers` together with a batch or
    shares, or with another number of latent layers than the pool has; OutOfPagesError.
    """

    def __init__(
        self,
        pool: PagePool,
        max_pages: int | None = None,
        shares: Shares | None = None,
        batch: int | None = None,
        layers: Sequence[Any] = (),
    ) -> None:
        if batch is not None and (max_pages is None or shares is not None):
            raise CacheMismatchError(
                "expected max_pages, and no shares, with a batch, whose pages are all taken at once"
            )
        self.pool, self.max_pages, self.shares, self.batch = pool, max_pages, shares, batch
        latents = [i for i, layer in enumerate(layers) if layer is None]
        if layers and (batch is not None or shares is not None or len(latents) != len(pool.layers)):
            raise CacheMismatchError(
                f"expected {len(pool.layers)} of the layers to keep latents, as many as the pool has, and "
                f"neither shares nor a batch with them, found {len(latents)}"
            )
        self._unused = list(layers)
        self.layers: list[Any] = copy.deepcopy(self._unused)
        self._places = dict(zip(latents, range(len(latents)), strict=True))
        self._table: BlockTable | None = None if batch is None else self._new_table(batch)
        self._indexer_keys = IndexerKeys()
        self._steps = Steps(len(pool.layers))
        pool.collect()  # which compiled steps of this cache cannot

    @classmethod
    def of(
        cls,
        model: nn.Module,
        pages: int,
        page_size: int = 64,
        dtype: torch.dtype | None = None,
        scale: float | Tensor | None = None,
        mesh: DeviceMesh | None = None,
        interleave: int | None = None,
        batch: int | None = None,
        tokens: int | None = None,
    ) -> PagedLatentCache:
        """An empty cache over a pool of its own that fits a transformers model with MLA: its layers, widths and dtype.

        Args: model; pages and page_size; dtype, the model's (default), torch.float8_e4m3fn for an `FP8PagePool` (with
        `scale`), torch.int8 for an `INT8PagePool` or torch.int4 for an `INT4PagePool`; mesh, of one dimension, over
        whose ranks tokens are split, `interleave` at a time (default: a page), with that many pages on each; batch and
        tokens, to give that many sequences pages for that many tokens at construction. Their length is then a number
        on the device, and a compiled step is one graph for all lengths.
        Layers that keep a window of latents, or the state of linear attention, use transformers' own cache layers.
        Raises: CacheMismatchError if the model's configuration does not tell its sizes, for layers that cache something
        else (with a mesh or a batch: anything but latents), for any other dtype or scale, for a mesh of several
        dimensions or an interleave that does not divide page_size, and for a batch without tokens or with a mesh;
        OutOfPagesError if there are too few pages for the batch.
        """
        if (batch is None) != (tokens is None) or (batch is not None and mesh is not None):
            raise CacheMismatchError("expected batch and tokens to be given together, and without a mesh")
        for name, count in {} if batch is None else {"batch": batch, "tokens": tokens}.items():
            check_count(name, count)
        config: Any = getattr(model, "config", None)
        config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        alone = mesh is None and batch is None
        layers = own_layers(config)
        if others := others_than_kept(layers, alone=alone):
            besides = ", and at most an indexer's keys, a window or a state" if alone else ""
            raise CacheMismatchError(
                f"expected layers that cache a latent and a rope key per token{besides}, found "
                f"{type(model).__name__}, of which some have a {' and a '.join(others)}: let it make its own cache"
            )
        latents = [i for i, layer in enumerate(layers) if is_latents(layer, indexers=alone)]
        sizes = sizes_of(config, latents)
        if sizes is None:
            raise CacheMismatchError(
                "expected a model whose config has num_hidden_layers, kv_lora_rank and qk_rope_head_dim, the same in "
                f"all layers that cache latents, found {type(model).__name__}"
            )
        parameter = next(model.parameters())
        count, latent_width, rope_width = sizes
        check_count("pages", pages)
        shares = None if mesh is None else Shares.of(mesh, interleave, page_size, spare=pages)
        room = pages if shares is None else pages + 1
        sizes_of_pool = {"layers": count, "latent_width": latent_width, "rope_width": rope_width}
        pool = pool_in(dtype, scale, parameter, **sizes_of_pool, pages=room, page_size=page_size)
        if shares is not None:
            pool.take(1)  # the spare page: the last page is the first to be taken
        max_pages = None if tokens is None else (tokens + page_size - 1) // page_size
        kept = [None if i in latents else layer for i, layer in enumerate(layers)]
        return cls(pool, max_pages, shares, batch, kept if any(kept) else ())

    @property
    def is_compileable(self) -> bool:
        """Tells transformers to make a mask even for one token, before the forward, which it may compile itself."""
        return self.shares is not None or self.batch is not None

    def __len__(self) -> int:
        return len(self.layers) or len(self.pool.layers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({int(self.get_seq_length())} tokens, {self.pool.available} pages free)"

    @property
    def table(self) -> BlockTable | None:
        """The block table; None before the first token, unless the batch was given at construction."""
        return self._table

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append latents `[B, 1, S, L]` and rope keys `[B, 1, S, R]` of one layer, and return both for all T tokens.

        A layer without rope has rope keys of width 0.

        If tokens are split over ranks, whole pages of all ranks are gathered. Then, and for a batch that has all its
        pages from the start, the mask must hide keys behind the last token, as with a static cache.

        The first call in a step makes room for the tokens; the other layers write to the same places. The result is a
        naive read of the pages, which `backend="mla"` replaces by attention that reads the pages itself.

        Raises, with nothing changed (but see `get_mask_sizes`): OutOfPagesError; FreedError; CacheMismatchError for
        other widths, another dtype, device or batch, another number of tokens than another layer has in this step, and
        a layer that was left out of an earlier step.
        """
        if self._keeps(layer_idx):
            states: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
            return states
        layer_idx = self._places.get(layer_idx, layer_idx)
        batch, heads, count, _ = key_states.shape
        if heads != 1:
            raise CacheMismatchError(f"expected latents that all heads share, [B, 1, S, L], found {heads} heads")
        latent_width, rope_width = key_states.shape[-1], value_states.shape[-1]
        # Not `rope_width in (..., 0)`: where sizes are symbols, Dynamo finds none of them in a tuple.
        if latent_width != self.pool.latent_width or (rope_width != 0 and rope_width != self.pool.rope_width):
            expected = f"{self.pool.latent_width} and {self.pool.rope_width}"
            raise CacheMismatchError(
                f"expected latents and rope keys of widths {expected}, found {latent_width} and {rope_width}"
            )
        tokens = torch.cat([key_states, value_states], dim=-1)[:, 0]  # under autocast one may be wider than the other
        self.pool.check(tokens)
        if missing := self.pool.rope_width - rope_width:
            tokens = F.pad(tokens, (0, missing))
        table = self._new_table(batch) if self._table is None else self._table
        if table.batch != batch:
            raise CacheMismatchError(f"expected tokens of {table.batch} sequences, found {batch}")
        if self._steps.begins(layer_idx, count):
            self._extend(table, count)
        self._steps.take(layer_idx, count)
        self._table = table
        table.write(layer_idx, tokens)
        latent, k_rope = table.keys(layer_idx)
        return latent[:, None], k_rope[:, None, :, :rope_width]

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Append an indexer's keys `[B, S, I]` of one layer, and return those of all T tokens; they are not paged."""
        return self._indexer_keys.update(indexer_key_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """The tokens of each sequence; a tensor `[]`, int64, for a batch that has all its pages from the start."""
        if isinstance(self._table, FixedTable):
            return self._table.tokens
        if self._slides(layer_idx):
            window: int = self.layers[layer_idx].get_seq_length()
            return window
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The largest number of tokens that a sequence may have."""
        if self.shares is None:
            return self.pool.page_size * (self.pool.pages if self.max_pages is None else self.max_pages)
        return self.shares.page_tokens * (self.shares.spare if self.max_pages is None else self.max_pages)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys that `query_length` more tokens attend to, and the position of the first key.

        transformers asks this before a step, which starts with layers that keep a state or a window if the model does.
        As they can't go back, this raises OutOfPagesError if there are no pages for the step; not in compiled code,
        where what a step changes is written after that is known.
        """
        if self.batch is not None:
            return self.get_max_length(), 0
        if self._table is not None and self._kept() and not torch.compiler.is_compiling():
            self._table.require(query_length)
        if self._slides(layer_idx):
            sizes: tuple[int, int] = self.layers[layer_idx].get_mask_sizes(query_length)
            return sizes
        tokens = self._length + query_length
        return (tokens if self.shares is None else self.shares.room(tokens)), 0

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:
        """The position of the next token."""
        return self.get_seq_length()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of each sequence (in transformers the number is negative).

        Raises: CacheMismatchError for a positive number, or for more tokens than there are.
        """
        if tokens_to_remove > 0:
            raise CacheMismatchError(f"expected a negative number of tokens to remove, found {tokens_to_remove}")
        removed = -operator.index(tokens_to_remove)
        if self._table is not None:
            self._table.check_length(self._table.length - removed)
        for layer in self._kept():
            layer.crop(tokens_to_remove)
        if removed and self._table is not None:
            self._table.crop(self._table.length - removed)
            self._indexer_keys.crop(removed)
            self._steps.crop(removed)
            self._own()

    def fork(self, rows: Tensor | Sequence[int] | None = None) -> PagedLatentCache:
        """A second cache that continues sequences `rows` (default: all) and shares pages that neither will write.

        Its last page is copied if it is not full: left for later, that would break the graph of a compiled step.
        """
        other = type(self)(self.pool, self.max_pages, self.shares, layers=self._unused)
        batch = self.batch if self._table is None else self._table.batch
        if batch is None:
            return other
        every = torch.arange(batch)
        chosen = every if rows is None else every[torch.as_tensor(rows).cpu()]
        other.batch = self.batch and len(chosen)
        if self._table is not None:
            other._table = self._table.fork(None if rows is None else chosen)
            other._steps = self._steps.fork()
            other._indexer_keys = self._indexer_keys.select(chosen)
            other.layers = copy.deepcopy(self.layers)
            for layer in other._kept():
                layer.reorder_cache(chosen)
            for cache in (other, self):
                cache._own()
        return other

    def reset(self) -> None:
        """Release all pages; the cache is empty and can be used again."""
        if self._table is not None:
            self._table.free()
        self._table, self._indexer_keys, self._steps = None, IndexerKeys(), Steps(len(self.pool.layers))
        self.layers = copy.deepcopy(self._unused)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence i by sequence `beam_idx[i]`."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        if self._table is not None:
            self._select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep the sequences that `indices`, numbers or a bool mask, selects."""
        if self._table is not None:
            self._select(torch.arange(self.batch_size)[torch.as_tensor(indices).cpu()])

    @property
    def _length(self) -> int:
        """The number of tokens as counted on the host."""
        return 0 if self._table is None else self._table.length

    def _new_table(self, batch: int) -> BlockTable:
        if self.batch is not None and self.max_pages is not None:
            return FixedTable(self.pool, batch, self.max_pages)
        if self.shares is None:
            return BlockTable(self.pool, batch, self.max_pages)
        return SharedTable(self.pool, batch, self.max_pages, self.shares)

    def _select(self, rows: Tensor) -> None:
        if self._table is None:
            return
        self._table = self._table.select(rows)
        self._steps.end()
        self.batch = self.batch and self._table.batch
        self._indexer_keys = self._indexer_keys.select(rows)
        for layer in self._kept():
            layer.reorder_cache(rows)
        self._own()

    def _extend(self, table: BlockTable, count: int) -> None:
        """Make room for a step's tokens; if that is the first step and fails, states and windows are as new."""
        try:
            table.extend(count)
        except OutOfPagesError:
            if self._table is None:
                self.layers = copy.deepcopy(self._unused)
            raise

    def _keeps(self, layer_idx: int) -> bool:
        """Whether a layer uses a transformers cache layer."""
        return bool(self.layers) and self.layers[layer_idx] is not None

    def _slides(self, layer_idx: int) -> bool:
        """Whether a layer keeps a sliding window."""
        return self._keeps(layer_idx) and bool(getattr(self.layers[layer_idx], "is_sliding", False))

    def _kept(self) -> list[Any]:
        """The transformers cache layers in use."""
        return [layer for layer in self.layers if layer is not None]

    def _own(self) -> None:
        """Copy now the shared pages to which the next token will be written: in compiled code that breaks the graph."""
        assert self._table is not None
        with contextlib.suppress(OutOfPagesError):  # the next token will raise it
            self._table.own()

    @property
    def batch_size(self) -> int:
        return -1 if self._table is None else self._table.batch

    @property
    def is_initialized(self) -> bool:
        return self._table is not None

    @property
    def is_croppable(self) -> bool:
        return all(layer.is_croppable for layer in self._kept())

    @property
    def is_sliding(self) -> list[bool]:
        return [self._slides(i) for i in range(len(self))]

    @property
    def is_linear(self) -> list[bool]:
        return [self._keeps(i) and not self._slides(i) for i in range(len(self))]

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self)

    def activate_past_recording(self) -> None:
        """Make windows and states keep their past until they are cropped; pages are never dropped before that."""
        for layer in (*self._kept(), *(layer for layer in self._unused if layer is not None)):
            layer.activate_past_recording()
