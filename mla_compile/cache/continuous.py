"""`ContinuousModel`: run a model with MLA in transformers' continuous batching, with its latents in pages.

transformers' engine allocates keys and values of width `config.head_dim`, and passes its cache to the attention
function, after the up-projection. So it never sees a latent, and it fails for DeepSeek models, whose `head_dim` is that
of the rope key. But its scheduling of requests and blocks works for latents as well. So here the engine's own cache is
made as narrow as possible, the model gets one of our caches, and block n of the engine is page n of a pool. See
`docs/serving.md` for details.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, ContinuousMixin

from ..errors import CacheError, CacheMismatchError
from .argument import cache_argument
from .latent_cache import PagedLatentCache
from .model_layers import other_layers, own_layers
from .pool import PagePool, check_count
from .scheduling import resuming

LEAST_PAGE = 4
"""The smallest page that transformers' engine takes."""
_CALL = "call generate_batch or continuous_batching_context_manager, or use the model that this one was made from"


def _check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    for place, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise CacheMismatchError(f"expected a token or more in each request, found none in request {place}")


def _check_beams(beams: int | None) -> None:
    if (beams or 1) > 1:
        raise CacheMismatchError(f"expected one beam per request, found num_beams={beams}: the engine searches none")


class ContinuousModel(nn.Module, ContinuousMixin):
    """A transformers model with MLA that has transformers' `generate_batch`, `init_continuous_batching` and so on.

    A step in which every request adds one token runs as a batch that reads the pages, compiled with the
    `decode_compile_config` of the `ContinuousBatchingConfig`. Any other step runs as the single row of tokens that the
    engine makes, compiled with `varlen_compile_config`. `pages` and `page_size` replace `num_blocks` and `page_size` of
    that config. If the model is split over ranks, each rank has the latents of all tokens, and all ranks run the
    requests that the first one gets.

    Args: model, with `sdpa` or `eager` attention; pages, page_size, dtype and scale, as for `PagedLatentCache.of`.
    Raises: CacheMismatchError if the model's config does not tell its sizes, for layers that cache more than latents
    (an indexer's keys), for any other attention, dtype or scale; CacheError for transformers before 5.19, whose engine
    does not accept a page size.
    """

    _supports_flash_attn = False  # read by the engine: flash attention does not take latents

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
        if page_size < LEAST_PAGE:
            raise CacheMismatchError(
                f"expected a page_size of at least {LEAST_PAGE}, as transformers' engine does, found {page_size}"
            )
        inner: Any = model
        attention = inner.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise CacheMismatchError(f"expected a model with sdpa or eager attention, found {attention}")
        if others := other_layers(own_layers(inner.config.get_text_config(decoder=True)), indexers=False):
            raise CacheMismatchError(
                "expected layers that cache a latent and a rope key per token and nothing else, found "
                f"{type(model).__name__}, of which some have a {' and a '.join(others)}"
            )
        self.model, self.generation_config = inner, inner.generation_config
        self.device: torch.device = inner.device
        self.dtype: torch.dtype = inner.dtype
        # For tensor parallelism: without these each rank would schedule on its own what the group must run together.
        self._device_mesh, self.tp_plan = inner._device_mesh, inner.tp_plan
        self.config = copy.deepcopy(inner.config.get_text_config(decoder=True))
        self.config.num_key_value_heads, self.config.head_dim = 1, 1
        self.config._attn_implementation = "sdpa"  # makes the engine build masks
        # The engine allocates whole sectors, two more than it needs. A sector is the smallest whole number of blocks
        # that is a multiple of 128 bytes.
        block = 2 * self.dtype.itemsize * page_size * self.config.num_hidden_layers
        sector = math.lcm(block, 128) // block
        blocks = (2 + -(-pages // sector)) * sector
        self.pool = PagedLatentCache.of(model, blocks, page_size, dtype, scale).pool
        self.pool.take(blocks)  # the engine tracks which of them are in use
        for tensor in self.pool.tensors:
            torch._dynamo.mark_static(tensor)
        self.pages = pages
        self._cache_argument = cache_argument(inner.forward)
        self._varlen: Callable[..., Any] = self._varlen_step
        self._decode: Callable[..., Any] = self._decode_step

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> ContinuousBatchingManager:
        """As in transformers.

        Raises: CacheMismatchError for several sequences per request and for offloading of blocks to the CPU: in both
        cases the engine would copy blocks of its own cache; for beams, which it would not search. The manager raises it
        for a request without a prompt, for which the engine would take a token of another request.
        """
        generation = generation_config or self.generation_config
        batching = continuous_batching_config or ContinuousBatchingConfig()
        if (generation.num_return_sequences or 1) > 1:
            raise CacheMismatchError(f"expected one sequence per request, found {generation.num_return_sequences}")
        _check_beams(generation.num_beams)
        if batching.cpu_offload_space:
            raise CacheMismatchError(f"expected no cpu_offload_space, found {batching.cpu_offload_space} GiB")
        # We compile the steps ourselves: the engine would pad compiled steps to 64 tokens and 16,384 keys, and would no
        # longer say which steps only decode.
        self._varlen = _compiled(self._varlen_step, batching.varlen_compile_config)
        self._decode = _compiled(self._decode_step, batching.decode_compile_config)
        batching = replace(
            batching,
            num_blocks=self.pages,
            page_size=self.pool.page_size,
            scheduler_type=resuming(batching.scheduler_type),
            varlen_compile_config=None,
            decode_compile_config=None,
        )
        manager = super().init_continuous_batching(generation, batching, workload_hints)
        add_request = manager.add_request

        def add(input_ids: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            _check_prompts([input_ids])
            return add_request(input_ids, *args, **kwargs)

        manager.add_request = add
        return manager

    def generate_batch(self, inputs: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
        """As in transformers. Raises: as `init_continuous_batching` and its manager do, before anything runs."""
        _check_prompts(inputs)
        _check_beams(kwargs.get("num_beams"))
        return super().generate_batch(inputs, *args, **kwargs)

    def _get_logits_processor(self, generation_config: GenerationConfig) -> Any:
        return self.model._get_logits_processor(generation_config)

    def _supports_logits_to_keep(self) -> bool:
        return True

    def generate(self, *_: Any, **__: Any) -> Any:
        """Not supported, as requests are run together here.

        Raises: CacheError, which says what to call instead.
        """
        raise CacheError(f"expected a request to the engine, found a call of generate; {_CALL}")

    def forward(self, *args: Any, **step: Any) -> Any:
        """Run one step of the engine; see `_step`.

        Raises: CacheError if the caller is not the engine.
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
        """Run one step of the engine, with `input_ids` `[1, tokens]` of all requests in sequence.

        The engine's indices count rows of its cache, `block_physical_stride` per block. An empty read index means that
        all keys are new.
        """
        # Cloned, as compiled code would otherwise be guarded on the engine's buffers, of which these are views.
        input_ids, position_ids, logits_to_keep = input_ids.clone(), position_ids.clone(), logits_to_keep.clone()
        stride, size = cache.layer_to_allocator[0].block_physical_stride, self.pool.page_size
        read, write = read_index[0], write_index[0]
        new = write // stride, write % stride
        if max_length_q > 1 or read.numel() == 0:
            seen = (read // stride, read % stride) if read.numel() else new
            mask = attention_mask.clone(memory_format=torch.contiguous_format)
            return self._varlen(input_ids, position_ids, mask, logits_to_keep, new, seen)
        start = cu_seq_lens_k["full_attention"].long()
        # Pages of one request: at least two, as torch compiles anew for one where there were more, and the other way.
        most = max(-(-max_length_k["full_attention"] // size), 2)
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
        """Run `[1, tokens]` of any requests; `attention_mask` `[1, 1, tokens, keys]` keeps requests apart."""
        return self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            logits_to_keep=logits_to_keep,
            **{self._cache_argument: _Step(self.pool, new, seen=seen)},
        )

    def _decode_step(
        self, input_ids: Tensor, position_ids: Tensor, lengths: Tensor, new: tuple[Tensor, Tensor], table: Tensor
    ) -> Any:
        """Run one token of each request, `[B, 1]`; its keys are the first `lengths` `[B]` in pages `table` `[B, n]`."""
        keys = torch.arange(table.shape[1] * self.pool.page_size, device=table.device)
        mask = torch.zeros((len(table), len(keys)), dtype=self.dtype, device=table.device)
        mask = mask.masked_fill(keys >= lengths[:, None], torch.finfo(self.dtype).min)
        page, row = new
        return self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask[:, None, None],
            **{self._cache_argument: _Step(self.pool, (page[:, None], row[:, None]), table=table, lengths=lengths)},
        )


def _compiled(function: Callable[..., Any], config: CompileConfig | None) -> Callable[..., Any]:
    return function if config is None else torch.compile(function, **config.to_dict())


class _Step:
    """The model's cache for one step: the places of new tokens, and those of all keys or the table of their pages, of
    which sequences have `lengths` tokens."""

    is_compileable = False

    def __init__(
        self,
        pool: PagePool,
        new: tuple[Tensor, Tensor],
        seen: tuple[Tensor, Tensor] | None = None,
        table: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> None:
        self.pool, self.new, self.seen, self.table, self.lengths = pool, new, seen, table, lengths

    def update(self, latent: Tensor, k_rope: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write latents `[B, 1, S, L]` and rope keys `[B, 1, S, R]` to their places, and return both for all keys."""
        tokens = torch.cat([latent, k_rope], dim=-1)
        self.pool.write(layer, *self.new, tokens.view(*self.new[0].shape, -1))
        if self.seen is not None:
            all_latents, all_ropes = (keys[None, None] for keys in self.pool.keys(layer, *self.seen))
        else:
            assert self.table is not None
            assert self.lengths is not None
            all_latents, all_ropes = (keys.flatten(1, 2)[:, None] for keys in self.pool.keys(layer, self.table))
            if not torch.compiler.is_compiling():  # there masks hide what an earlier request left, even if it is NaN
                behind = torch.arange(all_latents.shape[2], device=self.table.device) >= self.lengths[:, None]
                all_latents, all_ropes = (t.masked_fill(behind[:, None, :, None], 0) for t in (all_latents, all_ropes))
        return all_latents, all_ropes

    def get_seq_length(self, layer: int = 0) -> int:
        """Always 0; not used, as positions are passed explicitly."""
        return 0
