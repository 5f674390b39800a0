"""Hugging Face models whose attention runs through the workspace, over a paged KV cache.

    import fiw.integrations.transformers as fiw_transformers

    fiw_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fiw")
    model.generate(**inputs, cache=fiw_transformers.PagedCache())

Without a `PagedCache` the same models run over the library's own cache, whose keys and values are read in place.
"""

from .attention import register
from .cache import PagedCache
from .workspaces import workspace

__all__ = ["PagedCache", "register", "workspace"]
