"""Octavo: LLM serving in separate processes over one paged KV cache."""

__version__ = "0.1.0"
