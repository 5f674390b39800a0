"""Every call and option against the reference, on random shapes, element types and frameworks."""

from dataclasses import replace

import numpy as np
import pytest

import fiw
from reference import assert_close, attend, random_batch

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
ROUNDS = 6


def random_options(rng, heads, framework):
    """(keyword arguments of a call, those of the reference)."""
    call, expected = {}, {}
    if rng.random() < 0.5:
        call["sm_scale"] = expected["sm_scale"] = float(rng.uniform(0.05, 0.3))
    if rng.random() < 0.3:
        call["window_left"] = expected["window_left"] = int(rng.integers(0, 40))
    if rng.random() < 0.3:
        call["logits_soft_cap"] = expected["soft_cap"] = float(rng.uniform(1, 20))
    if rng.random() < 0.3:
        expected["sinks"] = rng.standard_normal(heads).astype(np.float32)
        call["sinks"] = framework.make(expected["sinks"])
    if rng.random() < 0.3:
        expected["slopes"] = rng.uniform(0, 0.5, heads).astype(np.float32)
        call["alibi_slopes"] = framework.make(expected["slopes"])
    return call, expected


def outputs(framework, rows, heads, dim, dtype):
    """Poisoned `out` and `lse` to pass in; none where the framework's arrays cannot be written."""
    if not framework.writable:
        return {"return_lse": True}
    return {
        "out": framework.make(np.full((rows, heads, dim), np.nan), dtype),
        "lse": framework.make(np.full((rows, heads), np.nan)),
    }


def check(framework, result, given, expected, dtype):
    out, lse = result
    for name, returned in (("out", out), ("lse", lse)):
        assert isinstance(returned, framework.kind)
        if name in given:
            assert returned is given[name]
    assert framework.dtype(out) == dtype and framework.dtype(lse) == "float32"
    assert_close(framework.host(out), expected[0], TOLERANCE[dtype])
    assert_close(framework.host(lse), expected[1], TOLERANCE[dtype])


def build(rng, framework, batch, kv_dtype):
    """(cache, keys, values) in a random layout: what the library reads, and the same numbers for the reference."""
    k, v = framework.make(batch.k, kv_dtype), framework.make(batch.v, kv_dtype)
    keys, values = batch.gather(framework.host(k)), batch.gather(framework.host(v))
    if rng.random() < 0.5:
        k, v = (framework.make(np.swapaxes(framework.host(x), 1, 2), kv_dtype) for x in (k, v))
        return fiw.KvCache(k, v, "HND"), keys, values
    return fiw.KvCache(k, v), keys, values


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("call", ["decode", "prefill", "verify"])
def test_paged(ws, rng, framework, call, q_dtype, kv_dtype):
    for _ in range(ROUNDS // 3):
        batch = random_batch(rng)
        if call == "decode":
            qo_lens, arguments = [1] * len(batch.kv_lens), ()
        elif call == "verify":
            window = int(rng.integers(1, 6))
            qo_lens, arguments = [window] * len(batch.kv_lens), (window,)
        else:
            qo_lens = [int(rng.integers(0, length + 1)) for length in batch.kv_lens]
            arguments = (np.cumsum([0, *qo_lens]).tolist(),)
        q = framework.make(rng.standard_normal((sum(qo_lens), batch.heads, batch.dim)), q_dtype)
        cache, keys, values = build(rng, framework, batch, kv_dtype)
        table = fiw.PageTable.from_pages(batch.page_size, batch.num_pages, batch.pages, batch.kv_lens)
        options, reference_options = random_options(rng, batch.heads, framework)
        if call != "decode" and rng.random() < 0.5:
            options["causal"] = reference_options["causal"] = False
        given = outputs(framework, sum(qo_lens), batch.heads, batch.dim_vo, q_dtype)
        expected = attend(framework.host(q), qo_lens, keys, values, **reference_options)
        result = getattr(ws, call)(q, *arguments, cache, table, **options, **given)
        check(framework, result, given, expected, q_dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_ragged_prefill(ws, rng, framework, dtype):
    for _ in range(ROUNDS):
        batch = random_batch(rng)
        qo_lens = [int(rng.integers(0, length + 1)) for length in batch.kv_lens]
        q, k, v = (
            framework.make(rng.standard_normal(shape), dtype)
            for shape in (
                (sum(qo_lens), batch.heads, batch.dim),
                (sum(batch.kv_lens), batch.kv_heads, batch.dim),
                (sum(batch.kv_lens), batch.kv_heads, batch.dim_vo),
            )
        )
        cuts = np.cumsum(batch.kv_lens)[:-1]
        options, reference_options = random_options(rng, batch.heads, framework)
        expected = attend(
            framework.host(q),
            qo_lens,
            np.split(framework.host(k), cuts),
            np.split(framework.host(v), cuts),
            **reference_options,
        )
        given = outputs(framework, sum(qo_lens), batch.heads, batch.dim_vo, dtype)
        qo_indptr, kv_indptr = (np.cumsum([0, *lens]).astype(np.int32) for lens in (qo_lens, batch.kv_lens))
        check(framework, ws.ragged_prefill(q, k, v, qo_indptr, kv_indptr, **options, **given), given, expected, dtype)


@pytest.mark.parametrize("packed", [True, False])
def test_custom_mask(ws, rng, framework, packed):
    for _ in range(ROUNDS):
        batch = random_batch(rng)
        qo_lens = [int(rng.integers(0, length + 1)) for length in batch.kv_lens]
        masks = [rng.random((queries, keys)) < 0.6 for queries, keys in zip(qo_lens, batch.kv_lens, strict=True)]
        flat = np.concatenate([mask.reshape(-1) for mask in masks])
        q = framework.make(rng.standard_normal((sum(qo_lens), batch.heads, batch.dim)))
        cache, keys, values = build(rng, framework, batch, "float32")
        table = fiw.PageTable.from_pages(batch.page_size, batch.num_pages, batch.pages, batch.kv_lens)
        mask = flat
        if packed:
            mask = fiw.PackedMask(*map(framework.put, fiw.pack_mask(flat, qo_lens, batch.kv_lens)))
        given = outputs(framework, sum(qo_lens), batch.heads, batch.dim_vo, "float32")
        result = ws.prefill(q, np.cumsum([0, *qo_lens]).tolist(), cache, table, custom_mask=mask, **given)
        check(framework, result, given, attend(framework.host(q), qo_lens, keys, values, masks=masks), "float32")


def test_pack_mask_bits(rng):
    qo_lens, kv_lens = [3, 0, 2], [5, 4, 8]
    masks = [rng.random((queries, keys)) < 0.5 for queries, keys in zip(qo_lens, kv_lens, strict=True)]
    packed = fiw.pack_mask(np.concatenate([mask.reshape(-1) for mask in masks]), qo_lens, kv_lens)
    assert packed.indptr.tolist() == [0, 2, 2, 4]
    for request, mask in enumerate(masks):
        start, end = packed.indptr[request : request + 2]
        bits = np.unpackbits(packed.bits[start:end], bitorder="little", count=mask.size)
        assert (bits.astype(bool) == mask.reshape(-1)).all()


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_append_then_prefill(ws, rng, framework, kv_dtype):
    if not framework.writable:
        pytest.skip("skipped: the framework's arrays cannot be written")
    for _ in range(ROUNDS):
        batch = random_batch(rng, min_len=1)
        new = [int(rng.integers(0, length + 1)) for length in batch.kv_lens]
        indptr = np.cumsum([0, *new]).tolist()
        scale = float(rng.uniform(0.5, 2)) if kv_dtype.startswith("float8") else 1.0
        k, v = framework.make(batch.k, kv_dtype), framework.make(batch.v, kv_dtype)
        before = [framework.host(k).copy(), framework.host(v).copy()]
        cache = fiw.KvCache(k, v, k_scale=scale, v_scale=scale)
        table = fiw.PageTable.from_pages(batch.page_size, batch.num_pages, batch.pages, batch.kv_lens)
        rows = [
            framework.make(rng.standard_normal((indptr[-1], batch.kv_heads, dim)), "float32")
            for dim in (batch.dim, batch.dim_vo)
        ]
        assert ws.append_kv(*rows, indptr, cache, table) is None
        for stored, old, given in zip((k, v), before, rows, strict=True):
            expected = old
            exact = framework.host(framework.make(framework.host(given) / scale, kv_dtype))
            for request, (pages, length) in enumerate(zip(batch.pages, batch.kv_lens, strict=True)):
                for i in range(new[request]):
                    token = length - new[request] + i
                    expected[pages[token // batch.page_size], token % batch.page_size] = exact[indptr[request] + i]
            actual = framework.host(stored)
            untouched = np.isnan(expected)
            assert (np.isnan(actual) == untouched).all()
            # The two roundings, of the division and to the cache's type, may fall to either side of a tie.
            ulp = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3, "float8_e4m3fn": 0.13, "float8_e5m2": 0.26}
            assert_close(actual[~untouched], expected[~untouched], ulp[kv_dtype])
            assert (actual[~untouched] == expected[~untouched]).mean() > 0.98
        q = framework.make(rng.standard_normal((indptr[-1], batch.heads, batch.dim)))
        keys, values = ([scale * tokens for tokens in batch.gather(framework.host(stored))] for stored in (k, v))
        expected = attend(framework.host(q), new, keys, values)
        check(framework, ws.prefill(q, indptr, cache, table, return_lse=True), {}, expected, "float32")


def test_interleaved_cache_and_head_scales(ws, rng, framework):
    batch = random_batch(rng, min_len=1, same_dims=True)
    scales = [rng.uniform(0.5, 2, batch.kv_heads).astype(np.float32) for _ in range(2)]
    cache = fiw.KvCache.interleaved(
        framework.make(np.stack([batch.k, batch.v], axis=1)),
        k_scale=0.5,
        v_scale=2.0,
        k_head_scale=framework.make(scales[0]),
        v_head_scale=framework.make(scales[1]),
    )
    assert (cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim_qk, cache.head_dim_vo) == (
        batch.num_pages,
        batch.page_size,
        batch.kv_heads,
        batch.dim,
        batch.dim,
    )
    keys = batch.gather(batch.k * (0.5 * scales[0][:, None]))
    values = batch.gather(batch.v * (2.0 * scales[1][:, None]))
    q = framework.make(rng.standard_normal((len(batch.kv_lens), batch.heads, batch.dim)))
    table = fiw.PageTable.from_pages(batch.page_size, batch.num_pages, batch.pages, batch.kv_lens)
    expected = attend(framework.host(q), [1] * len(batch.kv_lens), keys, values)
    check(framework, ws.decode(q, cache, table, return_lse=True), {}, expected, "float32")


def test_merge_states(ws, rng, framework):
    rows, heads, dim, parts = 7, 4, 16, 3
    q = rng.standard_normal((rows, heads, dim))
    k, v = rng.standard_normal((2, 30, heads, dim))
    cuts = [0, 11, 11, 30]
    states = []
    for part in range(parts):
        own = slice(cuts[part], cuts[part + 1])
        states.append([attend(q[row : row + 1], [1], [k[own]], [v[own]]) for row in range(rows)])
    pairs = [tuple(framework.make(np.concatenate([state[i] for state in part])) for i in range(2)) for part in states]
    expected = attend(q, [1] * rows, [k] * rows, [v] * rows)
    check(framework, ws.merge_states(pairs, return_lse=True), {}, expected, "float32")
    given = outputs(framework, rows, heads, dim, "float32")
    check(framework, ws.merge_states(pairs, **given), given, expected, "float32")
    assert isinstance(ws.merge_states(pairs), framework.kind)


def test_out_alone_is_returned_unless_lse_is_asked_for(ws, rng, framework):
    batch = random_batch(rng)
    cache, keys, values = build(rng, framework, batch, "float32")
    q = framework.make(rng.standard_normal((len(batch.kv_lens), batch.heads, batch.dim)))
    table = fiw.PageTable.from_pages(batch.page_size, batch.num_pages, batch.pages, batch.kv_lens)
    expected = attend(framework.host(q), [1] * len(batch.kv_lens), keys, values)
    out = ws.decode(q, cache, table)
    assert isinstance(out, framework.kind)
    assert_close(framework.host(out), expected[0], TOLERANCE["float32"])


@pytest.mark.parametrize("kind", ["decode", "prefill", "verify"])
def test_steps_run_every_layer_with_one_plan(ws, rng, framework, kind):
    batch = random_batch(rng, min_len=4)
    spec = fiw.StepSpec(
        num_qo_heads=batch.heads,
        num_kv_heads=batch.kv_heads,
        head_dim_qk=batch.dim,
        head_dim_vo=batch.dim_vo,
        q_dtype=framework.make([0.0]).dtype,
        kv_dtype="float32",
        lse=True,
        custom_mask=kind == "verify",
    )
    table = fiw.PageTable.from_pages(batch.page_size, batch.num_pages, batch.pages, batch.kv_lens)
    qo_len = {"decode": 1, "prefill": 3, "verify": 4}[kind]
    qo_lens = [qo_len] * len(batch.kv_lens)
    plan = {
        "decode": lambda: ws.plan_decode(table, spec),
        "prefill": lambda: ws.plan_prefill(np.cumsum([0, *qo_lens]).tolist(), table, spec),
        "verify": lambda: ws.plan_verify(qo_len, table, spec),
    }[kind]
    assert not plan().info.cache_hit
    step = plan()
    assert step.info.cache_hit and step.info.batch == len(batch.kv_lens)
    masks, extras = None, {}
    if kind == "verify":
        masks = [rng.random((qo_len, keys)) < 0.7 for keys in batch.kv_lens]
        extras["custom_mask"] = np.concatenate([mask.reshape(-1) for mask in masks])
    for _ in range(2):
        layer = replace(batch, k=rng.permuted(batch.k, axis=-1), v=rng.permuted(batch.v, axis=-1))
        q = framework.make(rng.standard_normal((sum(qo_lens), batch.heads, batch.dim)))
        cache, keys, values = build(rng, framework, layer, "float32")
        expected = attend(framework.host(q), qo_lens, keys, values, masks=masks)
        check(framework, step.run(q, cache, return_lse=True, **extras), {}, expected, "float32")


def test_alibi_slopes():
    assert_close(fiw.alibi_slopes(8), 2.0 ** -np.arange(1, 9), 1e-6)
