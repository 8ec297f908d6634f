"""Hopper device code of prefill attention: TMA tiles, asynchronous wgmma, one warp that only loads.

Written in Gluon, Triton's explicit dialect. Two warpgroups own 64 rows each of a block of 128 rows
of one query head and share the K and V tiles that the producer warp streams through rings of shared
memory. Inside a warpgroup the scores of tile j and the output of tile j - 1 are in the tensor cores
while softmax runs. Every program walks over the blocks that fall to it.

Two barriers guard a ring slot: full (its bytes have landed), free (both warpgroups have read it).
The phase bit of a barrier is the parity of how often the slot was used.

Rows of other sequences may lie inside a tile. Foreign Q rows are computed and not stored. Keys that
no row of the block sees are masked to p = 0; as 0 * NaN is NaN their V rows are zeroed in shared
memory, which concerns the last tile only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Renamed between triton 3.6 and 3.9; arguments and meaning are the same.
_TMA_LOAD = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_BARRIER = getattr(gl, "barrier", None) or gl.thread_barrier

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
WG_ROWS: gl.constexpr = gl.constexpr(64)  # rows of one wgmma
BLOCK_M: gl.constexpr = gl.constexpr(128)


@gluon.jit
def _turns(tiles):
    """Number of blocks that fall to this program."""
    return gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _block_of(turn, tiles, blocks, NUM_HEADS: gl.constexpr, HEADS_X: gl.constexpr):
    """(sequence, head, first row) of a turn: longest blocks first, in a snake over the programs.

    HEADS_X heads run side by side, then the next block of them, then the next heads.
    """
    programs = gl.num_programs(0)
    at = gl.program_id(0)
    if (turn % 2 == 1) & (turn < tiles // programs):  # the last, partial round goes straight
        at = programs - 1 - at
    tile = turn * programs + at
    group = tile // HEADS_X // blocks
    block = blocks - 1 - tile // HEADS_X % blocks
    head = group % (NUM_HEADS // HEADS_X) * HEADS_X + tile % HEADS_X
    return group // (NUM_HEADS // HEADS_X), head, block * BLOCK_M


@gluon.jit
def _span(cu_seqlens, seqused, n):
    """(first token, tokens) of sequence n."""
    start = gl.load(cu_seqlens + n)
    if seqused is not None:
        length = gl.load(seqused + n)
    else:
        length = gl.load(cu_seqlens + n + 1) - start
    return start, length


@gluon.jit
def _key_tiles(m0, nq, nk, CAUSAL: gl.constexpr, ALIGN_RIGHT: gl.constexpr, BLOCK_N: gl.constexpr):
    """(shift, hi, full, count): some row sees keys < hi, all rows see the first `full` tiles.

    count >= 1 tiles hold the keys < hi; row i is at position i + shift.
    """
    shift = nk - nq if ALIGN_RIGHT else 0
    hi = nk
    full = nk // BLOCK_N
    if CAUSAL:
        hi = gl.maximum(0, gl.minimum(nk, gl.minimum(m0 + BLOCK_M, nq) + shift))
        full = gl.maximum(0, gl.minimum(nk, m0 + shift + 1)) // BLOCK_N
    return shift, hi, full, gl.maximum(1, gl.cdiv(hi, BLOCK_N))


@gluon.jit
def _produce(
    shared, source, walk, lengths, rows_out, layout,
    CAUSAL: gl.constexpr, ALIGN_RIGHT: gl.constexpr, G: gl.constexpr, NUM_HEADS: gl.constexpr,
    HEADS_X: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp; it also clears the rows between the sequences."""
    q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free, _ = shared
    q_desc, k_desc, v_desc = source
    tiles, blocks, sequences = walk
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = lengths
    out, lse, num_q = rows_out
    q_head_row, q_head_col, k_head_row, k_head_col, v_head_row, v_head_col = layout
    BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
    done = 0  # K and V tiles of the blocks before
    active = 0  # blocks before
    for turn in range(_turns(tiles)):
        n, head, m0 = _block_of(turn, tiles, blocks, NUM_HEADS, HEADS_X)
        start_q, nq = _span(cu_seqlens_q, seqused_q, n)
        if m0 < nq:
            start_k, nk = _span(cu_seqlens_k, seqused_k, n)
            _shift, _hi, _full, count = _key_tiles(m0, nq, nk, CAUSAL, ALIGN_RIGHT, BLOCK_N)
            for w in gl.static_range(2):
                mbarrier.wait(q_free.index(w), (active & 1) ^ 1)
                mbarrier.expect(q_full.index(w), WG_ROWS * HEAD_DIM * 2)
                q_row = start_q + m0 + w * WG_ROWS + head * q_head_row
                _TMA_LOAD(q_desc, [q_row, head * q_head_col], q_full.index(w), q_s.index(w))
            k_row = start_k + head // G * k_head_row
            v_row = start_k + head // G * v_head_row
            k_col = head // G * k_head_col
            v_col = head // G * v_head_col
            for j in range(count):
                slot = (done + j) % STAGES
                phase = ((done + j) // STAGES & 1) ^ 1
                mbarrier.wait(k_free.index(slot), phase)
                mbarrier.expect(k_full.index(slot), BYTES)
                row = k_row + j * BLOCK_N
                _TMA_LOAD(k_desc, [row, k_col], k_full.index(slot), k_s.index(slot))
                mbarrier.wait(v_free.index(slot), phase)
                mbarrier.expect(v_full.index(slot), BYTES)
                row = v_row + j * BLOCK_N
                _TMA_LOAD(v_desc, [row, v_col], v_full.index(slot), v_s.index(slot))
            done += count
            active += 1
        end = num_q
        if n + 1 < sequences:
            end = gl.load(cu_seqlens_q + n + 1)
        _clear(out, lse, start_q + nq, end, head, m0, blocks, num_q, NUM_HEADS, HEAD_DIM)
        if n == 0:
            _clear(out, lse, 0, start_q, head, m0, blocks, num_q, NUM_HEADS, HEAD_DIM)


@gluon.jit
def _clear(
    out, lse, lo, hi, head, m0, blocks, num_q, NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """out = 0, lse = -inf in this block's share of the rows lo .. hi of a head. One warp."""
    ROWS: gl.constexpr = 1024 // HEAD_DIM
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [1, 1], [1, 0]
    )
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    zero = gl.full([ROWS, HEAD_DIM], 0.0, out.dtype.element_ty, layout)
    empty = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    for row in range(lo + m0 // BLOCK_M * ROWS, hi, blocks * ROWS):
        inside = row + r < hi
        gl.store(lse + head.to(gl.int64) * num_q + row + r, empty, mask=inside)
        wide = head.to(gl.int64) + gl.cast(row, gl.int64) * NUM_HEADS
        rows = out + wide * HEAD_DIM
        pointers = rows + r[:, None] * (NUM_HEADS * HEAD_DIM) + d[None, :]
        gl.store(pointers, zero, mask=inside[:, None])


@gluon.jit
def _softmax(s, m, l, scale, last, MASK: gl.constexpr, BLOCK_N: gl.constexpr):
    """One online softmax step in base 2 -> (p, m, l, rescale of older sums).

    Row i of the scores s [64, BLOCK_N] sees the columns up to last [64].
    """
    if MASK:
        columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
        s = gl.where(columns[None, :] <= last[:, None], s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    if MASK:  # a row that has seen no key yet: exp2(-inf - 0) = 0, not exp2(-inf + inf) = NaN
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        base = m_new
    alpha = gl.exp2(m - base)
    p = gl.exp2(s * scale - base[:, None])
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _zero_rows(v, valid, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zero the rows valid .. of a V tile [BLOCK_N, HEAD_DIM] in shared memory.

    Every warpgroup does it for itself: they write the same bits, whoever comes first.
    """
    STEP: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    row = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    for r in gl.static_range(0, BLOCK_N, STEP):
        if r + STEP > valid:
            part = v.slice(r, STEP, dim=0)
            x = part.load(layout)
            zero = gl.full([STEP, HEAD_DIM], 0.0, v.dtype, layout)
            part.store(gl.where((row + r < valid)[:, None], x, zero))
    _BARRIER()
    fence_async_shared()
    _BARRIER()


@gluon.jit
def _tiles(
    acc, p, m, l, q, shared, done, lo, hi, scale, last,
    W: gl.constexpr, MASK: gl.constexpr, P_LAYOUT: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles lo .. hi; p [64, BLOCK_N] are the weights of tile lo - 1, whose output is still owed.

    last [64]: the last key that a row sees.
    """
    _, k_s, v_s, _, _, k_full, k_free, v_full, v_free, l_s = shared
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    for j in range(lo, hi):
        i = done + j
        slot = i % STAGES
        old = (i - 1) % STAGES
        mbarrier.wait(k_full.index(slot), i // STAGES & 1)
        zero = gl.zeros([WG_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        k = k_s.index(slot).permute((1, 0))
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(old), (i - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_s.index(old), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_free.index(slot), count=1)
        x, m, l, alpha = _softmax(s, m, l, scale, last - j * BLOCK_N, MASK, BLOCK_N)
        # Written out and never read: the assembler keeps memory operations in front of the wait,
        # and with them the exp2 that it would otherwise sink below it, out of the matrix shadow.
        l_s.index(W).store(l)
        acc, x = warpgroup_mma_wait(0, deps=(acc, x))
        mbarrier.arrive(v_free.index(old), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = gl.convert_layout(x.to(p.dtype), P_LAYOUT)
    return acc, p, m, l


@gluon.jit
def _consume(
    shared, walk, lengths, rows_out, sinks, scale,
    W: gl.constexpr, CAUSAL: gl.constexpr, ALIGN_RIGHT: gl.constexpr, NUM_HEADS: gl.constexpr,
    HEADS_X: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: attention of its 64 rows of every block."""
    q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free, _ = shared
    tiles, blocks, _ = walk
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = lengths
    out, lse, num_q = rows_out
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q = q_s.index(W)
    done = 0
    active = 0
    for turn in range(_turns(tiles)):
        n, head, m0 = _block_of(turn, tiles, blocks, NUM_HEADS, HEADS_X)
        start_q, nq = _span(cu_seqlens_q, seqused_q, n)
        if m0 < nq:
            _start_k, nk = _span(cu_seqlens_k, seqused_k, n)
            shift, hi, full, count = _key_tiles(m0, nq, nk, CAUSAL, ALIGN_RIGHT, BLOCK_N)
            rows = m0 + W * WG_ROWS + gl.arange(0, WG_ROWS, ROW)
            last = gl.full([WG_ROWS], nk - 1, gl.int32, ROW)
            if CAUSAL:
                last = gl.minimum(last, rows + shift)
            mbarrier.wait(q_full.index(W), active & 1)
            slot = done % STAGES
            mbarrier.wait(k_full.index(slot), done // STAGES & 1)
            zero = gl.zeros([WG_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
            k = k_s.index(slot).permute((1, 0))
            s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_free.index(slot), count=1)
            m = gl.full([WG_ROWS], float("-inf"), gl.float32, ROW)
            l = gl.zeros([WG_ROWS], gl.float32, ROW)
            x, m, l, _alpha = _softmax(s, m, l, scale, last, True, BLOCK_N)
            p = gl.convert_layout(x.to(q.dtype), P_LAYOUT)
            acc = gl.zeros([WG_ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
            full = gl.maximum(full, 1)
            acc, p, m, l = _tiles(
                acc, p, m, l, q, shared, done, 1, full, scale, last,
                W, False, P_LAYOUT, BLOCK_N, STAGES,
            )  # fmt: skip
            acc, p, m, l = _tiles(
                acc, p, m, l, q, shared, done, full, count, scale, last,
                W, True, P_LAYOUT, BLOCK_N, STAGES,
            )  # fmt: skip
            done += count
            slot = (done - 1) % STAGES
            mbarrier.wait(v_full.index(slot), (done - 1) // STAGES & 1)
            if hi < count * BLOCK_N:
                _zero_rows(v_s.index(slot), hi - (count - 1) * BLOCK_N, BLOCK_N, HEAD_DIM)
            acc = warpgroup_mma(p, v_s.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_free.index(slot), count=1)

            empty = m == float("-inf")
            m = gl.where(empty, 0.0, m)
            share = gl.full([WG_ROWS], 1.0, gl.float32, ROW)
            if sinks is not None:
                sink = gl.load(sinks + head).to(gl.float32) * LOG2E
                m_sink = gl.maximum(m, sink)
                share = gl.exp2(m - m_sink)
                l = l * share + gl.exp2(sink - m_sink)
                m = m_sink
            l = gl.where(empty, 1.0, l)
            row_lse = gl.where(empty, float("-inf"), (m + gl.log2(l)) * LN2)
            lse_rows = lse + head.to(gl.int64) * num_q + start_q
            gl.store(lse_rows + rows, row_lse, mask=rows < nq)
            share = gl.convert_layout(share / l, gl.SliceLayout(1, O_LAYOUT))
            _store_rows(
                (acc * share[:, None]).to(q.dtype), q, q_free.index(W), out, start_q,
                m0 + W * WG_ROWS, nq, head, NUM_HEADS, HEAD_DIM,
            )  # fmt: skip
            active += 1


@gluon.jit
def _store_rows(
    tile, q, q_free, out, start_q, first, nq, head,
    NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Write tile [64, HEAD_DIM] to the rows first .. nq, in whole rows by way of Q's room."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    q.store(tile)  # this warpgroup has read its Q
    _BARRIER()
    x = q.load(layout)
    fence_async_shared()
    mbarrier.arrive(q_free, count=1)  # behind a barrier of the warpgroup
    r = gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    rows = out + ((start_q + first).to(gl.int64) * NUM_HEADS + head) * HEAD_DIM
    pointers = rows + r[:, None] * (NUM_HEADS * HEAD_DIM) + d[None, :]
    gl.store(pointers, x, mask=(first + r < nq)[:, None])


_RUNTIME = ["num_q", "tiles", "blocks", "sequences"]
_RUNTIME += [f"{name}_head_{step}" for name in "qkv" for step in ("row", "col")]


@gluon.jit(do_not_specialize=_RUNTIME)
def prefill_gluon_kernel(
    q_desc, k_desc, v_desc, sinks, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    q_head_row, q_head_col, k_head_row, k_head_col, v_head_row, v_head_col,
    num_q, tiles, blocks, sequences, scale,
    CAUSAL: gl.constexpr, ALIGN_RIGHT: gl.constexpr, G: gl.constexpr, NUM_HEADS: gl.constexpr,
    HEADS_X: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [2, WG_ROWS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    l_s = gl.allocate_shared_memory(gl.float32, [2, WG_ROWS], flat)
    for w in gl.static_range(2):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_free.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=2)
        mbarrier.init(v_free.index(s), count=2)
    fence_async_shared()
    shared = (q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free, l_s)
    walk = (tiles, blocks, sequences)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    rows_out = (out, lse, num_q)
    source = (q_desc, k_desc, v_desc)
    layout = (q_head_row, q_head_col, k_head_row, k_head_col, v_head_row, v_head_col)
    gl.warp_specialize(
        [
            (_consume, (shared, walk, lengths, rows_out, sinks, scale, 0, CAUSAL, ALIGN_RIGHT,
                        NUM_HEADS, HEADS_X, HEAD_DIM, BLOCK_N, STAGES)),
            (_consume, (shared, walk, lengths, rows_out, sinks, scale, 1, CAUSAL, ALIGN_RIGHT,
                        NUM_HEADS, HEADS_X, HEAD_DIM, BLOCK_N, STAGES)),
            (_produce, (shared, source, walk, lengths, rows_out, layout, CAUSAL, ALIGN_RIGHT, G,
                        NUM_HEADS, HEADS_X, HEAD_DIM, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
