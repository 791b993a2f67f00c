"""`ContinuousModel`: a model with MLA in transformers' own continuous batching, its latents in pages.

The engine has room for keys and values of `config.head_dim`, and gives its cache to the attention function, behind the
up-projection: no latent gets there, and a DeepSeek model, whose `head_dim` is its rope key's, fails. But who runs, and
in which blocks, it decides for latents as well. So its own cache is made as narrow as it can be, the model gets a cache
of ours, and block n of the engine is page n of a pool. `docs/serving.md` has the details.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, ContinuousMixin

from ..errors import CacheError, CacheMismatchError
from .latent_cache import PagedLatentCache, other_layers, own_layers
from .pool import PagePool, check_count

_CALL = "call generate_batch or continuous_batching_context_manager, or the model that this one was made of"


class ContinuousModel(nn.Module, ContinuousMixin):
    """A transformers model with MLA that has `generate_batch`, `init_continuous_batching` and the like of transformers.

    A step in which every request adds one token runs as a batch that reads the pages, compiled as the
    `decode_compile_config` of the `ContinuousBatchingConfig` says; any other step as the one row of tokens that the
    engine makes of it, compiled as `varlen_compile_config` says. `pages` and `page_size` replace `num_blocks` and
    `page_size` of that config. Where a model is shared out over ranks, each has the latents of all tokens, and all run
    what the first of them is asked for.

    Args: model, under `sdpa` or `eager` attention; pages, page_size, dtype and scale, as of `PagedLatentCache.of`.
    Raises: CacheMismatchError, if the model's config does not tell its sizes, for layers that keep more than latents
    (an indexer's keys), for another attention, dtype or scale; CacheError with transformers before 5.19, whose engine
    cannot be told its page size.
    """

    _supports_flash_attn = False  # to the engine that is: no flash attention takes latents

    def __init__(
        self,
        model: nn.Module,
        pages: int,
        page_size: int = 64,
        dtype: torch.dtype | None = None,
        scale: float | Tensor | None = None,
    ) -> None:
        super().__init__()
        if "page_size" not in {field.name for field in fields(ContinuousBatchingConfig)}:
            raise CacheError(f"ContinuousModel needs transformers 5.19 or later, found {transformers.__version__}")
        check_count("pages", pages)
        check_count("page_size", page_size)
        inner: Any = model
        attention = inner.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise CacheMismatchError(f"expected a model under sdpa or eager attention, found {attention}")
        if others := other_layers(own_layers(inner.config.get_text_config(decoder=True)), indexers=False):
            raise CacheMismatchError(
                "expected layers that cache a latent and a rope key a token and nothing else, found "
                f"{type(model).__name__}, of which some have a {' and a '.join(others)}"
            )
        self.model, self.generation_config = inner, inner.generation_config
        self.device: torch.device = inner.device
        self.dtype: torch.dtype = inner.dtype
        # Of tensor parallelism: without them each rank would schedule by itself what the group has to run together.
        self._device_mesh, self.tp_plan = inner._device_mesh, inner.tp_plan
        self.config = copy.deepcopy(inner.config.get_text_config(decoder=True))
        self.config.num_key_value_heads, self.config.head_dim = 1, 1
        self.config._attn_implementation = "sdpa"  # has the engine make masks
        # The engine's first two sectors are for padding; a sector is whole blocks, and a multiple of 128 bytes.
        block = 2 * self.dtype.itemsize * page_size * self.config.num_hidden_layers
        padding = 2 * math.lcm(block, 128) // block
        self.pool = PagedLatentCache.of(model, pages + padding, page_size, dtype, scale).pool
        self.pool.take(pages + padding)  # which of them are in use, the engine knows
        for tensor in self.pool.tensors:
            torch._dynamo.mark_static(tensor)
        self.pages = pages
        self._varlen: Callable[..., Any] = self._varlen_step
        self._decode: Callable[..., Any] = self._decode_step

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> ContinuousBatchingManager:
        """As in transformers.

        Raises: CacheMismatchError for several sequences a request and for blocks that are moved to the CPU, for which
        the engine would copy blocks of its own cache.
        """
        generation = generation_config or self.generation_config
        batching = continuous_batching_config or ContinuousBatchingConfig()
        if (generation.num_return_sequences or 1) > 1:
            raise CacheMismatchError(f"expected one sequence a request, found {generation.num_return_sequences}")
        if batching.cpu_offload_space:
            raise CacheMismatchError(f"expected no cpu_offload_space, found {batching.cpu_offload_space} GiB")
        # The engine pads what it compiles to 64 tokens and 16,384 keys, and then says no more which steps only decode.
        self._varlen = _compiled(self._varlen_step, batching.varlen_compile_config)
        self._decode = _compiled(self._decode_step, batching.decode_compile_config)
        batching = replace(
            batching,
            num_blocks=self.pages,
            page_size=self.pool.page_size,
            varlen_compile_config=None,
            decode_compile_config=None,
        )
        return super().init_continuous_batching(generation, batching, workload_hints)

    def _get_logits_processor(self, generation_config: GenerationConfig) -> Any:
        return self.model._get_logits_processor(generation_config)

    def _supports_logits_to_keep(self) -> bool:
        return True

    def generate(self, *_: Any, **__: Any) -> Any:
        """None: requests come together here.

        Raises: CacheError, which says what to call.
        """
        raise CacheError(f"expected a request of many, found generate; {_CALL}")

    def forward(self, *args: Any, **step: Any) -> Any:
        """One step of the engine, see `_step`.

        Raises: CacheError, if it is not the engine that calls.
        """
        if args or "cache" not in step:
            raise CacheError(f"expected a step of the engine, found a call of the model; {_CALL}")
        return self._step(**step)

    def _step(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: Tensor,
        read_index: list[Tensor],
        write_index: list[Tensor],
        cu_seq_lens_k: dict[str, Tensor],
        max_length_q: int,
        max_length_k: dict[str, int],
        cache: Any,
        **_: Any,
    ) -> Any:
        """One step of the engine: `input_ids` `[1, tokens]` of all requests, one behind the other.

        Its indices count rows of its cache: `block_physical_stride` of them a block. Nothing to read means that all
        keys are new.
        """
        # Compiled code would be guarded on the buffers of the engine that these are views of.
        input_ids, position_ids, logits_to_keep = input_ids.clone(), position_ids.clone(), logits_to_keep.clone()
        stride, size = cache.layer_to_allocator[0].block_physical_stride, self.pool.page_size
        read, write = read_index[0], write_index[0]
        new = write // stride, write % stride
        if max_length_q > 1 or read.numel() == 0:
            seen = (read // stride, read % stride) if read.numel() else new
            mask = attention_mask.clone(memory_format=torch.contiguous_format)
            return self._varlen(input_ids, position_ids, mask, logits_to_keep, new, seen)
        start = cu_seq_lens_k["full_attention"].long()
        most = -(-max_length_k["full_attention"] // size)  # pages of one request
        first = start[:-1, None] + size * torch.arange(most, device=start.device)  # first token of each page
        table = read[first.clamp(max=read.shape[0] - 1)] // stride
        output = self._decode(input_ids.T, position_ids.T, start.diff(), new, table)
        output.logits = output.logits.transpose(0, 1)[:, logits_to_keep]
        return output

    def _varlen_step(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: Tensor,
        new: tuple[Tensor, Tensor],
        seen: tuple[Tensor, Tensor],
    ) -> Any:
        """`[1, tokens]` of any requests; `attention_mask` `[1, 1, tokens, keys]` says whose keys are whose."""
        return self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=_Step(self.pool, new, seen=seen),
            logits_to_keep=logits_to_keep,
        )

    def _decode_step(
        self, input_ids: Tensor, position_ids: Tensor, lengths: Tensor, new: tuple[Tensor, Tensor], table: Tensor
    ) -> Any:
        """One token of each request, `[B, 1]`; its keys are the first `lengths` `[B]` in pages `table` `[B, n]`."""
        keys = torch.arange(table.shape[1] * self.pool.page_size, device=table.device)
        mask = torch.zeros((len(table), len(keys)), dtype=self.dtype, device=table.device)
        mask = mask.masked_fill(keys >= lengths[:, None], torch.finfo(self.dtype).min)
        page, row = new
        return self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask[:, None, None],
            past_key_values=_Step(self.pool, (page[:, None], row[:, None]), table=table),
        )


def _compiled(function: Callable[..., Any], config: CompileConfig | None) -> Callable[..., Any]:
    return function if config is None else torch.compile(function, **config.to_dict())


class _Step:
    """The cache in one step: the pages and rows of new tokens, and those of all keys, or the table of their pages."""

    is_compileable = False

    def __init__(
        self,
        pool: PagePool,
        new: tuple[Tensor, Tensor],
        seen: tuple[Tensor, Tensor] | None = None,
        table: Tensor | None = None,
    ) -> None:
        self.pool, self.new, self.seen, self.table = pool, new, seen, table

    def update(self, latent: Tensor, k_rope: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Put latents `[B, 1, S, L]` and rope keys `[B, 1, S, R]` in their places; both of all keys."""
        tokens = torch.cat([latent, k_rope], dim=-1)
        self.pool.write(layer, *self.new, tokens.view(*self.new[0].shape, -1))
        if self.seen is not None:
            all_latents, all_ropes = (keys[None, None] for keys in self.pool.keys(layer, *self.seen))
        else:
            assert self.table is not None
            all_latents, all_ropes = (keys.flatten(1, 2)[:, None] for keys in self.pool.keys(layer, self.table))
        return all_latents, all_ropes

    def get_seq_length(self, layer: int = 0) -> int:
        """Nobody needs it: positions are given."""
        return 0
