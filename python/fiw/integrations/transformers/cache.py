"""The paged KV cache: transformers' `Cache` interface over pages, and attention over what they hold."""

from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import fiw

from .packing import Packing, check_window, count_tokens
from .pages import PagedRows
from .workspaces import workspace

MAX_VERIFY_WINDOW = 64  # tokens a request that the workspace's verify call takes


class _Step:
    """One forward pass: what its layers share."""

    def __init__(self, packing: Packing, copies: list[tuple[int, int]], gaps: bool, device: torch.device) -> None:
        self.packing = packing
        self.gaps = gaps
        self.copies = torch.tensor(copies, device=device).unbind(1) if copies else None


class _Batch:
    """The state that the layers of a cache share: its rows, and the forward pass that they are in."""

    def __init__(self, page_size: int, num_pages: int | None) -> None:
        self.rows = PagedRows(page_size, num_pages)
        self.columns = 0  # as transformers counts: padding too
        self.verifies = False  # several tokens at once, after the first ones, are drafts
        self.padding: torch.Tensor | None = None  # the last mask, [batch, columns]
        self.step: _Step | None = None

    def begin(self, key: torch.Tensor, padding: torch.Tensor | None) -> _Step:
        """Gives the tokens of a forward pass their places: `key` [batch, heads, columns, dim], its first layer's."""
        batch, _, columns, _ = key.shape
        counts, totals, mask, gaps = [columns] * batch, [self.columns] * batch, None, False
        if padding is not None:
            if padding.shape != (batch, self.columns):
                raise ValueError(
                    f"attention_mask: shape {list(padding.shape)}, expected {[batch, self.columns]}: "
                    "one column for each token that the cache holds and each new one"
                )
            counts, totals, gaps = count_tokens(padding, columns)
            mask = padding[:, -columns:]
        before = [total - count for total, count in zip(totals, counts, strict=True)]
        held = self.rows.lengths
        if len(held) == batch and held != before:
            raise ValueError(
                f"attention_mask: {before} tokens before the new ones, expected {held}, as the cache holds"
            )
        copies = self.rows.append(counts)
        self.padding = padding
        self.step = _Step(Packing(counts, columns, mask), copies, gaps, key.device)
        return self.step

    def crop(self, columns: int) -> None:
        """Takes the last `columns` columns, and the tokens in them."""
        counts = [columns] * len(self.rows.lengths)
        if self.padding is not None:
            counts, _, _ = count_tokens(self.padding, columns)
            self.padding = self.padding[:, :-columns]
        self.rows.crop(counts)
        self.columns -= columns

    def select(self, rows: list[int]) -> None:
        """Makes the batch of these rows of it."""
        self.rows.select(rows)
        if self.padding is not None:
            self.padding = self.padding[rows]

    def reset(self) -> None:
        self.rows.clear()
        self.columns = 0
        self.verifies = False
        self.padding = self.step = None

    def __getstate__(self) -> dict[str, object]:
        """For copies, which are made between forward passes."""
        return {**self.__dict__, "step": None}


class PagedLayer(CacheLayerMixin):
    """One layer's keys and values, [num_pages, page_size, num_kv_heads, head_dim] each."""

    is_croppable = True

    def __init__(self, batch: _Batch) -> None:
        super().__init__()
        self._batch = batch
        self.columns = 0  # how far this layer is

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (
            states.new_empty(0, self._batch.rows.page_size, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands the new tokens on: `attend` stores them, which knows the padding among them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.columns += key_states.shape[2]
        if self.columns > self._batch.columns:  # the first layer of a forward pass
            self._batch.columns = self.columns
            self._batch.step = None
        key_states.fiw_layer = self
        return key_states, value_states

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Stores `key` and `value` [batch, num_kv_heads, columns, head_dim], then attends to all that is stored.

        `padding` bool [batch, all columns], true for tokens, or None: there is none. `query` [batch, num_qo_heads,
        columns, head_dim] to [batch, columns, num_qo_heads, head_dim].
        """
        rows = self._batch.rows
        step = self._batch.step or self._batch.begin(key, padding)
        check_window(step.gaps, options["window_left"])
        self._grow(rows.num_pages)
        if step.copies is not None:
            source, target = step.copies
            self.keys[target] = self.keys[source]
            self.values[target] = self.values[source]

        ws, table, packing = workspace(query.device), rows.table, step.packing
        cache = fiw.KvCache(self.keys, self.values)
        ws.append_kv(packing.pack(key), packing.pack(value), packing.indptr, cache, table)
        q = packing.pack(query)
        if not packing.full:
            out = ws.prefill(q, packing.indptr, cache, table, **options)
        elif packing.columns == 1:
            out = ws.decode(q, cache, table, **options)
        elif self._batch.verifies and self.columns > packing.columns <= MAX_VERIFY_WINDOW:
            out = ws.verify(q, packing.columns, cache, table, **options)
        else:
            out = ws.prefill(q, packing.indptr, cache, table, **options)
        return packing.unpack(out)

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _grow(self, num_pages: int) -> None:
        held = self.keys.shape[0]
        if held < num_pages:
            grown = [states.new_empty(num_pages, *states.shape[1:]) for states in (self.keys, self.values)]
            for new, old in zip(grown, (self.keys, self.values), strict=True):
                new[:held] = old
            self.keys, self.values = grown


class PagedCache(Cache):
    """A cache for `model.generate(..., cache=PagedCache())` with `attn_implementation="fiw"`.

    Every layer's keys and values lie in pages of `page_size` tokens, numbered alike in all layers. Padding takes no
    room. With `num_pages`, that many are allocated at the first forward pass, and a pass that needs more raises
    MemoryError; without, the pool grows as needed. `crop` and `reset` free pages for reuse; beams share pages until
    they differ. After a forward pass that failed, `reset` makes the cache usable again.
    """

    def __init__(self, page_size: int = 16, num_pages: int | None = None) -> None:
        for name, value in (("page_size", page_size), ("num_pages", num_pages)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value}, expected at least 1")
        self._batch = _Batch(page_size, num_pages)
        super().__init__(layer_class_to_replicate=partial(PagedLayer, self._batch))

    @property
    def page_size(self) -> int:
        return self._batch.rows.page_size

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self._batch.rows.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._batch.rows.num_free

    @property
    def page_table(self) -> fiw.PageTable:
        """Which pages belong to which request."""
        return self._batch.rows.table

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included, as transformers counts."""
        return self._batch.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        return -1

    def activate_past_recording(self) -> None:
        """Announces drafts: from now on, several tokens at once are a verify window."""
        self._batch.verifies = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens, given as a negative number, from each request."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: {tokens_to_remove}, expected a negative number or 0")
        if tokens_to_remove < -self._batch.columns:
            raise ValueError(f"tokens_to_remove: {tokens_to_remove}, expected at least {-self._batch.columns}")
        if tokens_to_remove < 0:
            self._batch.crop(-tokens_to_remove)
            self._sync_layers()

    def reset(self) -> None:
        """Forgets all requests. Their pages are free; the memory stays."""
        self._batch.reset()
        self._sync_layers()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i the row beam_idx[i]."""
        self._batch.select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._batch.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._batch.select([row for row in range(len(self._batch.rows.lengths)) for _ in range(repeats)])

    def _sync_layers(self) -> None:
        for layer in self.layers:
            layer.columns = self._batch.columns
