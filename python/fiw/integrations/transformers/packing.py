"""Padded batches and packed rows: a workspace's calls take tokens one after the other, without padding between."""

import itertools

import numpy as np
import torch


def count_tokens(mask: torch.Tensor, columns: int) -> tuple[list[int], list[int], bool]:
    """Tokens among each request's last `columns` columns, among all, and whether padding lies between some.

    `mask` bool [batch, all columns], true for tokens. On CUDA it waits for the mask.
    """
    starts = (mask[:, 1:] > mask[:, :-1]).sum(1) + mask[:, 0]
    last, total, starts = torch.stack([mask[:, -columns:].sum(1), mask.sum(1), starts]).tolist()
    return last, total, max(starts) > 1


def check_window(gaps: bool, window_left: int) -> None:
    """A window counts tokens here, and columns in transformers' masks: the same unless padding lies between tokens."""
    if gaps and window_left >= 0:
        raise NotImplementedError(
            "attention_mask: padding between tokens, which a layer with a sliding window cannot have"
        )


class Packing:
    """The tokens among `columns` columns of a batch, and how rows of theirs go to and fro.

    `counts` are each request's tokens and `indptr` their running sums, as the workspace's calls take them. `picked`
    says which of the batch * columns rows hold tokens; None: all do.
    """

    def __init__(self, counts: list[int], columns: int, mask: torch.Tensor | None) -> None:
        """`mask` bool [batch, columns], true for tokens; `counts` its rows' sums, which the caller has on the host."""
        self.counts = counts
        self.columns = columns
        self.indptr = np.array([0, *itertools.accumulate(counts)], np.int32)
        self.full = sum(counts) == len(counts) * columns
        self.picked = None if self.full else mask.flatten().nonzero().squeeze(1)

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """[batch, heads, columns, dim] to [tokens, heads, dim]; a view where the memory allows."""
        rows = states.transpose(1, 2).flatten(0, 1)
        return rows if self.full else rows.index_select(0, self.picked)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] to [batch, columns, heads, dim], with zeros for padding."""
        if not self.full:
            padded = rows.new_zeros(len(self.counts) * self.columns, *rows.shape[1:])
            rows = padded.index_copy_(0, self.picked, rows)
        return rows.unflatten(0, (len(self.counts), self.columns))
