"""Attention in float64, one query at a time, and random batches to compare with it."""

from dataclasses import dataclass

import numpy as np


def attend_row(q, k, v, visible, *, sm_scale, soft_cap=0.0, slopes=None, distance=None, sinks=None):
    """One query [heads, d] over keys [n, kv_heads, d], [n, kv_heads, dv]; visible [n]. Returns (out, lse)."""
    heads, kv_heads = q.shape[0], k.shape[1]
    out = np.zeros((heads, v.shape[2]))
    lse = np.full(heads, -np.inf)
    for head in range(heads):
        keys, values = k[visible, head * kv_heads // heads], v[visible, head * kv_heads // heads]
        if len(keys) == 0:
            continue
        logits = sm_scale * keys @ q[head]
        if slopes is not None:
            logits = logits + slopes[head] * distance[visible]
        if soft_cap > 0:
            logits = soft_cap * np.tanh(logits / soft_cap)
        terms = logits if sinks is None else np.append(logits, sinks[head])
        lse[head] = terms.max() + np.log(np.exp(terms - terms.max()).sum())
        out[head] = np.exp(logits - lse[head]) @ values
    return out, lse


def attend(
    q,
    qo_lens,
    keys,
    values,
    *,
    sm_scale=None,
    causal=True,
    window_left=-1,
    soft_cap=0.0,
    slopes=None,
    sinks=None,
    masks=None,
):
    """Ragged attention: q [rows, heads, d]; keys, values: one array a request. Returns (out, lse)."""
    scale = 1 / np.sqrt(q.shape[2]) if sm_scale is None else sm_scale
    outs, sums, row = [], [], 0
    for request, qo_len in enumerate(qo_lens):
        kv_len = len(keys[request])
        j = np.arange(kv_len)
        for p in range(qo_len):
            position = kv_len - qo_len + p
            if masks is not None:
                visible = masks[request][p].astype(bool)
            else:
                visible = (j <= position) if causal else np.ones(kv_len, bool)
            if window_left >= 0:
                visible = visible & (j >= position - window_left)
            out, lse = attend_row(
                q[row],
                keys[request],
                values[request],
                visible,
                sm_scale=scale,
                soft_cap=soft_cap,
                slopes=slopes,
                distance=j - position,
                sinks=sinks,
            )
            outs.append(out)
            sums.append(lse)
            row += 1
    heads = q.shape[1]
    return (
        np.array(outs).reshape(row, heads, values[0].shape[2] if values else 0),
        np.array(sums).reshape(row, heads),
    )


@dataclass
class Batch:
    """A random paged batch; `k`, `v` are float32 [pages, page_size, kv_heads, dim] (NHD), NaN in unused slots."""

    page_size: int
    num_pages: int
    heads: int
    kv_heads: int
    dim: int
    dim_vo: int
    kv_lens: list
    pages: list
    k: np.ndarray
    v: np.ndarray

    def gather(self, cache):
        """One array of keys or values a request, float64, from a cache in NHD."""
        return [
            cache[pages].reshape(-1, *cache.shape[2:])[:length].astype(np.float64)
            for pages, length in zip(self.pages, self.kv_lens, strict=True)
        ]


def random_batch(rng, *, min_len=0, same_dims=False):
    page_size = int(rng.integers(1, 20))
    kv_heads = int(rng.integers(1, 4))
    heads = kv_heads * int(rng.integers(1, 5))
    dim = 8 * int(rng.integers(1, 17))
    dim_vo = dim if same_dims or rng.random() < 0.5 else 8 * int(rng.integers(1, 17))
    kv_lens = [int(length) for length in rng.integers(min_len, 80, size=rng.integers(1, 6))]
    counts = [-(-length // page_size) for length in kv_lens]
    num_pages = sum(counts) + int(rng.integers(1, 5))
    order = rng.permutation(num_pages).astype(int).tolist()
    pages = [[order.pop() for _ in range(count)] for count in counts]
    k = np.full((num_pages, page_size, kv_heads, dim), np.nan, np.float32)
    v = np.full((num_pages, page_size, kv_heads, dim_vo), np.nan, np.float32)
    for own, length in zip(pages, kv_lens, strict=True):
        for token in range(length):
            k[own[token // page_size], token % page_size] = rng.standard_normal((kv_heads, dim))
            v[own[token // page_size], token % page_size] = rng.standard_normal((kv_heads, dim_vo))
    return Batch(page_size, num_pages, heads, kv_heads, dim, dim_vo, kv_lens, pages, k, v)


def assert_close(actual, expected, tolerance):
    """Infinities in the same places, no NaN, and the rest within abs + rel `tolerance`."""
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    assert not np.isnan(actual).any(), f"{np.isnan(actual).sum()} NaN"
    finite = np.isfinite(expected)
    assert (actual[~finite] == expected[~finite]).all()
    worst = np.abs(actual[finite] - expected[finite]) - tolerance * np.abs(expected[finite])
    assert worst.size == 0 or worst.max() <= tolerance, f"off by {worst.max()} beyond rel {tolerance}"
