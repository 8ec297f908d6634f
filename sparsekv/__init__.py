"""sparsekv: KV-cache sparsity for LLM inference.

Dimension letters, fixed for the whole package:
B rows (batch), T query tokens, S cached slots, HQ / HK query / KV heads, G = HQ / HK,
D head_dim, P page_size, N pages, L layers, W observation window.
"""
