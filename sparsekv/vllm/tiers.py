"""PyramidKV in a few tiers: fewer pinned blocks from tier to tier, the same within one.

A number of blocks of its own makes a KV cache group of its own in vLLM, which pads groups to equal
numbers of layers: so there are T tiers of equally many layers instead of a ramp over layers. With C
pinned tokens a layer on average, tier t = 0 .. T-1 has the mean of the ramp over its depth,

    low = C // beta        high = 2 C - low        b_t = high - (high - low) (2 t + 1) / (2 T)

in whole blocks by largest remainder: the sum over tiers is T times the mean. A prompt cannot raise
or lower these numbers: one that a tier has room for is dense there.
"""

from __future__ import annotations

from fractions import Fraction

from sparsekv.policies.budgets import largest_remainder


def tier_blocks(mean: int, block_size: int, tiers: int, beta: int) -> list[int]:
    """Pinned blocks of each tier, falling, `mean` on average. ValueError where one has none."""
    tokens = mean * block_size
    low = tokens // beta
    high = 2 * tokens - low
    ramp = [high - Fraction((high - low) * (2 * t + 1), 2 * tiers) for t in range(tiers)]
    blocks = largest_remainder([b / block_size for b in ramp], tiers * mean)
    if blocks[-1] < 1:
        raise ValueError(
            f"expected at least one pinned block in each of {tiers} tiers, got {blocks} blocks of "
            f"{block_size} tokens: a larger budget or fewer tiers"
        )
    return blocks


def tier_of(layer: int, layers: int, full_layers: int, tiers: int) -> int:
    """The tier of a layer, numbered from the model's first one. ValueError for unequal tiers."""
    sparse = layers - full_layers
    if sparse % tiers:
        fitting = [n for n in range(layers) if (layers - n) % tiers == 0]
        nearest = sorted(fitting, key=lambda n: abs(n - full_layers))[:2]
        hint = f"full_layers={' or '.join(map(str, sorted(nearest)))}" if nearest else "fewer tiers"
        raise ValueError(
            f"expected sparse layers in {tiers} tiers of equal size, got {sparse}: {hint} would do"
        )
    return (layer - full_layers) // (sparse // tiers)


def padded(layers: list[int]) -> list[int]:
    """Layers that vLLM counts for groups of these specs, each in as many layers, with its padding.

    Groups have the layers of the smallest entry, or of the largest if it is less than half as many
    more.
    """
    size = min(layers)
    if max(layers) < 1.5 * size:
        size = max(layers)
    return [-(-n // size) * size for n in layers]
