"""Small models with random weights of the families that the transformers integration serves, and how to run them."""

import random
from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 128
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt-oss")
CLEAR_CHOICE = 1e-4  # a greedy choice by less is the rounding's, about 1e-6 here, as much as the model's


def random_config(family: str, rng: random.Random, **fixed: int) -> PreTrainedConfig:
    """A small configuration: any grouping of heads, a head dim of its own, windows shorter than the sequences.

    `fixed` are fields of it that are not drawn."""
    kv_heads = rng.choice((1, 2, 3))
    heads = kv_heads * rng.choice((1, 2, 3, 4))
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * rng.choice((8, 16)),
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice((8, 16, 24, 40)),
        "initializer_range": 0.2,  # wide, so that greedy choices are clear
        "tie_word_embeddings": False,  # tied ones, with random weights, say the last token again
    } | fixed
    window = rng.randint(2, 12)
    match family:
        case "llama":
            return LlamaConfig(**shape)
        case "mistral":
            return MistralConfig(**shape, sliding_window=window)
        case "qwen2":
            del shape["head_dim"]  # hidden_size / num_attention_heads
            return Qwen2Config(**shape, use_sliding_window=True, sliding_window=window, max_window_layers=2)
        case "qwen3":
            return Qwen3Config(**shape, use_sliding_window=True, sliding_window=window, max_window_layers=2)
        case "gemma2":
            scalar, softcap = rng.choice((8, 20, 48)), rng.uniform(0.5, 5.0)
            return Gemma2Config(
                **shape, sliding_window=window, query_pre_attn_scalar=scalar, attn_logit_softcapping=softcap
            )
        case "gemma3":
            layer_types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
            scalar = rng.choice((8, 20, 48))
            return Gemma3TextConfig(
                **shape, sliding_window=window, query_pre_attn_scalar=scalar, layer_types=layer_types
            )
        case "gpt-oss":
            return GptOssConfig(**shape, sliding_window=window, num_local_experts=2, num_experts_per_tok=1)
    raise ValueError(f"family: {family}, expected one of {FAMILIES}")


def random_model(family: str, rng: random.Random, dtype: torch.dtype = torch.float32, **fixed: int) -> PreTrainedModel:
    torch.manual_seed(rng.getrandbits(32))
    return AutoModelForCausalLM.from_config(random_config(family, rng, **fixed), dtype=dtype).eval()


def yardstick(family: str) -> str:
    """The attention to compare with: sdpa has no soft caps and no sinks, and transformers refuses it for these."""
    return "eager" if family in ("gemma2", "gpt-oss") else "sdpa"


@dataclass
class Prompts:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


def random_prompts(rng: random.Random, batch: int, longest: int) -> Prompts:
    """Prompts of random lengths, padded on the left."""
    lengths = [rng.randint(1, longest) for _ in range(batch)]
    columns = max(lengths)
    ids = torch.tensor([[rng.randrange(3, VOCABULARY) for _ in range(columns)] for _ in lengths])
    mask = torch.tensor([[0] * (columns - length) + [1] * length for length in lengths])
    return Prompts(ids, mask)


def generate(model: PreTrainedModel, attention: str, prompts: Prompts, tokens: int, **options: object) -> torch.Tensor:
    """`tokens` new tokens, chosen greedily unless `options` say otherwise: [batch, tokens]."""
    model.set_attn_implementation(attention)
    sequences = model.generate(
        prompts.input_ids.to(model.device),
        attention_mask=prompts.attention_mask.to(model.device),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=VOCABULARY,  # none that a model chooses: in a text to be drafted on, it would mean padding
        **options,
    )
    return sequences[:, prompts.input_ids.shape[1] :]


@torch.no_grad()
def smallest_choice(model: PreTrainedModel, attention: str, prompts: Prompts, generated: torch.Tensor) -> float:
    """By how much the closest of the greedy choices that led to `generated` was made, in logits."""
    model.set_attn_implementation(attention)
    ids = torch.cat([prompts.input_ids.to(model.device), generated], 1)
    mask = torch.cat([prompts.attention_mask.to(model.device), torch.ones_like(generated)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    best = logits[:, -1 - generated.shape[1] : -1].topk(2, dim=-1).values
    return (best[..., 0] - best[..., 1]).min().item()


def clear_prompts(
    model: PreTrainedModel, attention: str, rng: random.Random, batch: int, longest: int, tokens: int
) -> tuple[Prompts, torch.Tensor]:
    """Random prompts, and what `attention` generates from them with a clear choice at every token."""
    while True:
        prompts = random_prompts(rng, batch, longest)
        expected = generate(model, attention, prompts, tokens)
        if smallest_choice(model, attention, prompts, expected) > CLEAR_CHOICE:
            return prompts, expected
