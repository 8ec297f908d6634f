"""What vLLM 0.26 lacks of the hooks that 0.32 has, put there; on 0.32 and later nothing is done."""

from __future__ import annotations


def apply() -> None:
    """Make `AttentionBackend.customize_spec` work where vLLM does not call it."""
    from vllm.v1.attention.backend import AttentionBackend

    if hasattr(AttentionBackend, "customize_spec"):
        return
    raise ValueError("not yet")
