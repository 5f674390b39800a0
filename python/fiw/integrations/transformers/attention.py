"""The attention and mask functions that transformers calls for `attn_implementation="fiw"`."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .packing import Packing, check_window, count_tokens
from .workspaces import workspace


def register() -> None:
    """Makes `attn_implementation="fiw"` known to transformers."""
    AttentionInterface.register("fiw", attention)
    AttentionMaskInterface.register("fiw", causal_mask)


class CausalMask:
    """What queries see: themselves and the tokens before, all of them or a window, and no padding."""

    def __init__(self, padding: torch.Tensor | None, window: int | None) -> None:
        """`padding` bool [batch, columns], true for tokens; `window` counts a query's own token."""
        self.padding = padding
        self.window_left = -1 if window is None else window - 1
        self._packings: tuple[Packing, Packing] | None = None

    def packings(self, batch: int, q_columns: int, kv_columns: int) -> tuple[Packing, Packing]:
        """Those of the last `q_columns` and `kv_columns` columns, for layers without a paged cache: alike in all."""
        if self._packings is None:
            self._packings = self._make_packings(batch, q_columns, kv_columns)
        return self._packings

    def _make_packings(self, batch: int, q_columns: int, kv_columns: int) -> tuple[Packing, Packing]:
        if self.padding is None:
            return Packing([q_columns] * batch, q_columns, None), Packing([kv_columns] * batch, kv_columns, None)
        mask = self.padding[:, -kv_columns:]
        q_counts, kv_counts, gaps = count_tokens(mask, q_columns)
        check_window(gaps, self.window_left)
        return Packing(q_counts, q_columns, mask[:, -q_columns:]), Packing(kv_counts, kv_columns, mask)


def causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    config: object = None,
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    **kwargs: object,
) -> CausalMask:
    """transformers' mask function. `allow_is_causal_skip` is its word for a mask that is causal and nothing else."""
    if not allow_is_causal_skip or getattr(config, "attention_chunk_size", None) is not None:
        raise NotImplementedError("fiw attention: the model's mask is neither causal nor a sliding window")
    if not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length:
        raise NotImplementedError("cache: fiw attention needs one that holds no room for later tokens")
    return CausalMask(attention_mask, local_size)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CausalMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [batch, heads, columns, dim] to [batch, columns, heads, dim].

    `s_aux` [heads] are attention sinks. The window is the mask's own.
    """
    if not isinstance(attention_mask, CausalMask):
        raise NotImplementedError("attention_mask: fiw attention takes none or two dimensions, in a causal decoder")
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError("fiw attention has no gradient: call the model under torch.no_grad()")
    for name, used in (
        ("dropout", dropout != 0.0),
        ("is_causal=False", kwargs.get("is_causal") is False),
        ("position_bias", kwargs.get("position_bias") is not None),
        ("output_attentions", bool(kwargs.get("output_attentions"))),
    ):
        if used:
            raise NotImplementedError(f"fiw attention: {name} is not covered")

    options: dict[str, Any] = {
        "sm_scale": scaling,
        "window_left": attention_mask.window_left,
        "logits_soft_cap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.detach().float(),
    }
    layer = getattr(key, "fiw_layer", None)
    if layer is not None:
        return layer.attend(query, key, value, attention_mask.padding, options), None
    queries, keys = attention_mask.packings(query.shape[0], query.shape[2], key.shape[2])
    out = workspace(query.device).ragged_prefill(
        queries.pack(query), keys.pack(key), keys.pack(value), queries.indptr, keys.indptr, **options
    )
    return queries.unpack(out), None
