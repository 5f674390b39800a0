"""Generation through the workspace, token for token that of transformers' own attention, on small random models."""

import copy
import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")
pytest.importorskip("transformers", reason="skipped: transformers is not installed")

from transformers import StaticCache

import fiw
import fiw.integrations.transformers as fiw_transformers
from fiw.integrations.transformers import PagedCache
from fiw.integrations.transformers.attention import causal_mask
from transformers_models import (
    FAMILIES,
    VOCABULARY,
    Prompts,
    clear_prompts,
    generate,
    random_model,
    random_prompts,
    yardstick,
)

fiw_transformers.register()


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch fills new tensors, pages and outputs among them, with NaN; on CUDA, this mode asks for more."""
    torch.use_deterministic_algorithms("cuda" not in request.node.name)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


def stats(device: torch.device | str = "cpu") -> fiw.WorkspaceStats:
    return fiw_transformers.workspace(device).stats()


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches(family: str, case: int, device: torch.device, rng: random.Random) -> None:
    model = random_model(family, rng).to(device)
    prompts, expected = clear_prompts(model, yardstick(family), rng, rng.randint(1, 4), longest=20, tokens=16)
    paged = generate(model, "fiw", prompts, 16, cache=PagedCache(page_size=rng.choice((1, 2, 3, 5, 16))))
    assert torch.equal(paged, expected)
    assert torch.equal(generate(model, "fiw", prompts, 16), expected), "over transformers' own cache"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_prefill_and_decode(family: str, rng: random.Random) -> None:
    model = random_model(family, rng)
    ids = random_prompts(rng, 1, 1).input_ids.new_tensor([[rng.randrange(VOCABULARY) for _ in range(24)]] * 2)
    ids[1] = ids[1].flip(0)
    with torch.no_grad():
        model.set_attn_implementation(yardstick(family))
        expected = model(ids, use_cache=False).logits
        model.set_attn_implementation("fiw")
        cache = PagedCache(page_size=4)
        cuts = [0, *sorted(rng.sample(range(1, 24), 4)), 24]
        pieces = [model(ids[:, begin:end], cache=cache).logits for begin, end in itertools.pairwise(cuts)]
        torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_padding(family: str, rng: random.Random) -> None:
    """Padding anywhere where no layer has a window, at both ends where one has."""
    model = random_model(family, rng)
    ids = torch.tensor([[rng.randrange(VOCABULARY) for _ in range(24)] for _ in range(3)])
    mask = torch.ones_like(ids)
    mask[0, : rng.randint(1, 10)] = 0
    mask[0, 20:] = 0
    if family == "llama":
        mask[1] = torch.tensor([rng.randint(0, 1) for _ in range(24)])
    cut = rng.randint(1, 19)
    with torch.no_grad():
        model.set_attn_implementation(yardstick(family))
        expected = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        model.set_attn_implementation("fiw")
        cache = PagedCache(page_size=4)
        first = model(ids[:, :cut], attention_mask=mask[:, :cut], cache=cache).logits
        model(ids[:, cut : cut + 3], attention_mask=mask[:, : cut + 3], cache=cache)
        cache.crop(-3)
        second = model(ids[:, cut:], attention_mask=mask, cache=cache).logits
        paged = torch.cat([first, second], 1)[mask.bool()]
        torch.testing.assert_close(paged, expected, rtol=1e-4, atol=1e-4)
        uncached = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        torch.testing.assert_close(uncached, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16"))
@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_models_are_as_close_to_float32_as_sdpa(
    family: str, dtype: torch.dtype, device: torch.device, rng: random.Random
) -> None:
    """Both attentions round their outputs, from sums in float32 of different order. So neither is exact, and what is
    asked is that the distance to the float32 model of the same weights is not more than sdpa's, by the median of the
    tokens; 1.5 is the room for chance."""
    shape = {"head_dim": 64, "num_key_value_heads": 2, "num_attention_heads": 8, "hidden_size": 512}
    on_cuda = device.type == "cuda"  # where this is a shape of the fast kernels
    model = random_model(family, rng, dtype=dtype, **(shape if on_cuda else {})).to(device)
    exact = copy.deepcopy(model).float()
    ids = torch.tensor([[rng.randrange(VOCABULARY) for _ in range(48)] for _ in range(4)], device=device)

    def distance(logits: torch.Tensor) -> float:
        return ((logits.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()

    with torch.no_grad():
        exact.set_attn_implementation(yardstick(family))
        expected = exact(ids, use_cache=False).logits
        model.set_attn_implementation(yardstick(family))
        allowed = 1.5 * distance(model(ids, use_cache=False).logits)
        model.set_attn_implementation("fiw")
        assert distance(model(ids, use_cache=False).logits) <= allowed
        cache = PagedCache(page_size=8)
        cache.activate_past_recording()  # prefill, then decode and verify windows
        pieces = [model(piece, cache=cache).logits for piece in ids.split((20, 1, 1, 5, 1, 9, 11), dim=1)]
        assert distance(torch.cat(pieces, 1)) <= allowed


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup(family: str, device: torch.device, rng: random.Random) -> None:
    model = random_model(family, rng).to(device)
    prompts, expected = clear_prompts(model, yardstick(family), rng, batch=1, longest=20, tokens=24)
    cache = PagedCache(page_size=2)
    assert torch.equal(generate(model, "fiw", prompts, 24, cache=cache, prompt_lookup_num_tokens=5), expected)
    assert cache.page_table.total_kv == cache.get_seq_length()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_assistant_s_drafts_are_verified_in_windows(family: str, device: torch.device, rng: random.Random) -> None:
    model, assistant = (random_model(one, rng).to(device) for one in (family, "llama"))
    assistant.set_attn_implementation("fiw")
    prompts, expected = clear_prompts(model, yardstick(family), rng, batch=1, longest=20, tokens=16)
    for drafter in (model, assistant):  # drafts that are all right, and that are nearly all wrong
        before = stats(device).verify
        cache = PagedCache(page_size=rng.choice((1, 2, 3)))
        drafter.generation_config.num_assistant_tokens = rng.randint(2, 5)
        drafter.generation_config.num_assistant_tokens_schedule = "constant"
        drafter.generation_config.assistant_confidence_threshold = 0.0
        assert torch.equal(generate(model, "fiw", prompts, 16, cache=cache, assistant_model=drafter), expected)
        after = stats(device).verify
        assert after.hits + after.misses > before.hits + before.misses, "drafts went through verify"
        assert cache.page_table.total_kv == cache.get_seq_length()


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_share_pages(family: str, device: torch.device, rng: random.Random) -> None:
    model = random_model(family, rng).to(device)
    prompts = random_prompts(rng, 2, 20)
    expected = generate(model, yardstick(family), prompts, 12, num_beams=3)
    cache = PagedCache(page_size=4)
    assert torch.equal(generate(model, "fiw", prompts, 12, num_beams=3, cache=cache), expected)
    assert cache.page_table.batch == 6
    assert cache.num_pages - cache.num_free_pages < sum(cache.page_table.page_counts), "no page is shared"


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("mistral", 1), ("gemma2", 2), ("qwen3", 2)])
def test_one_plan_serves_all_layers_of_a_step(family: str, kinds: int, rng: random.Random) -> None:
    """`kinds` of layers, with a window and without, need a plan each. A step that gains no page needs none."""
    model = random_model(family, rng)
    layers = model.config.num_hidden_layers
    model.set_attn_implementation("fiw")
    cache = PagedCache(page_size=4)
    cache.activate_past_recording()
    fiw_transformers.workspace("cpu").invalidate_runtime_cache()
    fiw_transformers.workspace("cpu").invalidate_verify_runtime_cache()

    def plans(scope: str, columns: int) -> int:
        """Runs a step; the plans it made, if all other calls found one."""
        before = getattr(stats(), scope)
        with torch.no_grad():
            model(torch.randint(VOCABULARY, (2, columns)), cache=cache)
        after = getattr(stats(), scope)
        made = after.misses - before.misses
        assert after.hits - before.hits == layers - made
        return made

    assert plans("prefill", 9) == kinds
    assert plans("decode", 1) == kinds  # 10 tokens
    assert plans("decode", 1) == 0
    assert plans("decode", 1) == 0
    assert plans("decode", 1) == kinds  # 13: each request gains a page
    assert plans("verify", 3) == kinds  # 16
    cache.crop(-2)
    assert plans("verify", 2) <= kinds


def test_pages_are_used_again(rng: random.Random) -> None:
    model = random_model("llama", rng)
    prompts, expected = clear_prompts(model, "sdpa", rng, batch=3, longest=20, tokens=8)
    cache = PagedCache(page_size=4)
    assert torch.equal(generate(model, "fiw", prompts, 8, cache=cache), expected)
    pool, first = cache.num_pages, [layer.keys.data_ptr() for layer in cache.layers]
    for _ in range(3):
        cache.reset()
        assert (cache.num_free_pages, cache.get_seq_length()) == (pool, 0)
        assert torch.equal(generate(model, "fiw", prompts, 8, cache=cache), expected)
    assert [layer.keys.data_ptr() for layer in cache.layers] == first
    assert cache.num_pages == pool


def test_a_pool_of_fixed_size(rng: random.Random) -> None:
    model = random_model("gemma3", rng)
    prompts, expected = clear_prompts(model, "sdpa", rng, batch=1, longest=8, tokens=8)
    cache = PagedCache(page_size=4, num_pages=4)
    assert torch.equal(generate(model, "fiw", prompts, 8, cache=cache), expected)
    cache.reset()
    with pytest.raises(MemoryError, match="num_pages: 4 pages of 4 tokens"):
        generate(model, "fiw", prompts, 24, cache=cache)
    cache.reset()
    assert torch.equal(generate(model, "fiw", prompts, 8, cache=cache), expected)


def test_a_conversation_goes_on_in_its_cache(rng: random.Random) -> None:
    model = random_model("qwen2", rng)
    prompts, first = clear_prompts(model, "sdpa", rng, batch=1, longest=8, tokens=8)
    cache = PagedCache(page_size=4)
    assert torch.equal(generate(model, "fiw", prompts, 8, cache=cache), first)
    more = torch.tensor([[rng.randrange(3, VOCABULARY) for _ in range(5)]])
    ids = torch.cat([prompts.input_ids, first, more], 1)
    longer = Prompts(ids, torch.ones_like(ids))
    assert torch.equal(generate(model, "fiw", longer, 8, cache=cache), generate(model, "sdpa", longer, 8))


def test_a_copied_cache_goes_its_own_way(rng: random.Random) -> None:
    model = random_model("llama", rng)
    prefix = random_prompts(rng, 1, 12).input_ids
    cache = PagedCache(page_size=4)
    model.set_attn_implementation("fiw")
    with torch.no_grad():
        model(prefix, cache=cache)
    for _ in range(2):
        ids = torch.cat([prefix, torch.tensor([[rng.randrange(3, VOCABULARY) for _ in range(4)]])], 1)
        prompts = Prompts(ids, torch.ones_like(ids))
        expected = generate(model, "sdpa", prompts, 6)
        assert torch.equal(generate(model, "fiw", prompts, 6, cache=copy.deepcopy(cache)), expected)
    assert cache.get_seq_length() == prefix.shape[1]


class TestBadCalls:
    """Each is refused in words, and the model and the workspace work on."""

    @pytest.fixture(autouse=True)
    def model_and_prompts(self, rng: random.Random) -> Iterator[None]:
        self.model = random_model("gemma2", rng)
        self.model.set_attn_implementation("fiw")
        self.ids = torch.tensor([[rng.randrange(3, VOCABULARY) for _ in range(6)] for _ in range(2)])
        with torch.no_grad():
            yield
            self.model(self.ids, cache=PagedCache())

    def refused(self, error: type[Exception], words: str, **options: object) -> None:
        with pytest.raises(error, match=words):
            self.model(self.ids, **options)

    def test_padding_between_tokens_and_windows(self) -> None:
        mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1]])
        for options in ({"cache": PagedCache()}, {"use_cache": False}):
            self.refused(NotImplementedError, "padding between tokens", attention_mask=mask, **options)

    def test_a_mask_that_forgets_what_is_stored(self) -> None:
        cache = PagedCache()
        self.model(self.ids, cache=cache)
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, 0] = 0
        words = r"attention_mask: \[5, 6\] tokens before the new ones, expected \[6, 6\]"
        self.refused(ValueError, words, attention_mask=mask, cache=cache)

    def test_a_mask_that_is_left_out_later(self) -> None:
        cache = PagedCache()
        mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
        self.model(self.ids, attention_mask=mask, cache=cache)
        words = r"attention_mask: \[6, 6\] tokens before the new ones, expected \[6, 5\]"
        self.refused(ValueError, words, cache=cache)

    def test_a_mask_of_the_new_tokens_alone(self) -> None:
        cache = PagedCache()
        self.model(self.ids, cache=cache)
        words = r"attention_mask: shape \[2, 6\], expected \[2, 12\]"
        self.refused(ValueError, words, attention_mask=torch.ones_like(self.ids), cache=cache)

    def test_a_mask_of_four_dimensions(self) -> None:
        self.refused(NotImplementedError, "two dimensions", attention_mask=torch.zeros(2, 1, 6, 6))

    def test_packed_sequences(self) -> None:
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
        self.refused(NotImplementedError, "neither causal", position_ids=positions, use_cache=False)

    def test_masks_of_other_kinds(self) -> None:
        chunks = SimpleNamespace(attention_chunk_size=4)
        for kind in ({"config": chunks, "allow_is_causal_skip": True}, {"allow_is_bidirectional_skip": True}):
            with pytest.raises(NotImplementedError, match="neither causal nor a sliding window"):
                causal_mask(batch_size=1, q_length=6, kv_length=6, **kind)

    def test_another_batch_in_the_same_cache(self) -> None:
        cache = PagedCache()
        self.model(self.ids[:1], cache=cache)
        self.refused(ValueError, "batch: 2 requests, expected 1", cache=cache)

    def test_a_static_cache(self) -> None:
        cache = StaticCache(config=self.model.config, max_cache_len=16)
        self.refused(NotImplementedError, "no room for later tokens", cache=cache)

    def test_gradients(self) -> None:
        with torch.enable_grad():
            self.refused(NotImplementedError, "no gradient")

    def test_attention_weights(self) -> None:
        self.refused(NotImplementedError, "output_attentions", output_attentions=True)

    def test_bad_sizes(self) -> None:
        with pytest.raises(ValueError, match="page_size: 0, expected at least 1"):
            PagedCache(page_size=0)
        with pytest.raises(ValueError, match="num_pages: 0, expected at least 1"):
            PagedCache(num_pages=0)

    def test_a_crop_by_length(self) -> None:
        with pytest.raises(ValueError, match="tokens_to_remove: 3, expected a negative number"):
            PagedCache().crop(3)
        with pytest.raises(ValueError, match="tokens_to_remove: -3, expected at least 0"):
            PagedCache().crop(-3)
