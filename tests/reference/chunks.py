"""ChunkKV: tokens stay or go with their neighbours; one choice for all heads of a layer."""

from __future__ import annotations

from collections import defaultdict

from reference.types import Head


def chunk_means(heads: list[Head], chunk: int) -> Head:
    """Mean score of each token's chunk, over its tokens and over the KV heads.

    heads: scores of the unprotected keys, the same positions in each; a chunk is position // chunk.
    """
    members: dict[int, list[float]] = defaultdict(list)
    for head in heads:
        for j, score in head.items():
            members[j // chunk].append(score)
    means = {c: sum(scores) / len(scores) for c, scores in members.items()}
    return {j: means[j // chunk] for j in heads[0]}
