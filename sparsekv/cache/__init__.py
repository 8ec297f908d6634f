"""The paged KV cache: a page pool per device and one block table per layer, row and KV head."""
