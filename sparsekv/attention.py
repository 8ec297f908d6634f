"""One layer, one forward: append -> attend -> observe -> select -> compact.

The only file that knows which of the three cases runs, as `SparseState.begin` sorts them:
prefill and chunk (`prompt.py`), decode (`decoding.py`).
"""

from __future__ import annotations

from torch import Tensor

from sparsekv.decoding import decode
from sparsekv.device import device_of
from sparsekv.headwise import Scores
from sparsekv.prompt import chunk, prefill
from sparsekv.pruning import attend_pruned
from sparsekv.state import SparseState


def attend(
    state: SparseState,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scores: Scores,
) -> Tensor:
    """Attention of T new tokens over what `layer` keeps, then eviction.

    q [B, HQ, T, D], k and v [B, HK, T, D] after RoPE; mask: 2-D padding mask over all columns seen
    so far and these T, or None. Returns [B, T, HQ, D]; rows of padding are 0.

    Raises:
        ValueError: see `SparseState.begin`.
    """
    first = state.seen[layer]
    parts = state.begin(layer, q, k, mask)
    with device_of(q):
        if state.policy.prunes:
            return attend_pruned(state, layer, parts[0], q, k, v, scores)
        outs = []
        for part in parts:
            run = {"prefill": prefill, "chunk": chunk, "decode": decode}[part.kind]
            own = [part.pick(x, first) for x in (q, k, v)]
            outs.append(run(state, layer, part, own[0], own[1], own[2], scores))
        if len(outs) == 1:
            return outs[0]
        out = outs[0].new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
        for part, x in zip(parts, outs, strict=True):
            part.put(out, x, first)
    return out


def rollback(state: SparseState, tokens: int) -> None:
    """Take back the last `tokens` columns of a recorded round and accept the others.

    The layers return to their snapshot and replay the accepted tokens, so that slots, scores and
    evictions are those of a run that never saw the rejected ones. Every column, recorded or not,
    can be taken back at once: the state is then empty.

    Raises:
        ValueError: more tokens than were recorded since the last call.
    """
    if tokens and {tokens} == set(state.seen):
        state.reset()
    elif tokens:
        recorded = min(len(state.log.get(layer, ())) for layer in range(len(state.layers)))
        if tokens > recorded:
            raise ValueError(
                f"expected to crop at most the {recorded} tokens recorded since the last crop "
                f"(activate_past_recording() starts recording), got {tokens}"
            )
        for layer, log in state.rewind(tokens).items():
            for part, q, k, v, scores in log:
                with device_of(q):
                    decode(state, layer, part, q, k, v, scores)
    state.settle()
