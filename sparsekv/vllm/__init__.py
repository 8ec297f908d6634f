"""A vLLM plugin: layers that keep a budget of tokens, in an unmodified vLLM server."""

from __future__ import annotations

from sparsekv.vllm.arguments import llm_kwargs

__all__ = ["llm_kwargs"]
