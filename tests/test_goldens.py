"""The reference proven first: every golden vector and set of the eviction survey, section 20.

The expected numbers were computed by others from the same formulas; four decimals are given.
"""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from golden_problem import KEYS, LOGITS, PROMPT, QUERIES, ROWS, SCALE, VALUES, scores
from reference import expected, keys, pyramid, pyramidinfer, quest, rkv, values
from reference.attention import rotated
from reference.critical import two_stages
from reference.heads import mixed, normalised, official, safeguarded, shares, top
from reference.keyformer import perturbed
from reference.kvzip import official_threshold
from reference.plans import make_plans
from reference.votes import (
    column_maxima,
    column_sums,
    grouped,
    low_counts,
    normalised_sums,
    pooled,
)

VISIBLE = torch.ones(2, 8, 8, dtype=torch.bool).tril()


def close(got, numbers, decimals=4):
    """Numbers that were rounded to `decimals`; 0.6 units, since the last digit was rounded."""
    got = torch.as_tensor(got, dtype=torch.float64)
    wanted = torch.tensor([float(n) for n in numbers.split()], dtype=torch.float64)
    torch.testing.assert_close(got, wanted, atol=0.6 * 10.0**-decimals, rtol=0)


def kept(ranking, count, recent=0, tokens=8):
    """Positions that stay: the last `recent` and the best of the others."""
    older = {j: ranking[j] for j in range(tokens - recent)}
    return sorted(top(older, count - recent) | set(range(tokens - recent, tokens)))


# ------------------------------------------------------------------ 20.1, 20.2: statistics


def test_log_sum_exp():
    lse = LOGITS.logsumexp(-1)
    close(lse[0], "2.5 2.1269 0.6803 2.9695 6.0370 3.5318 4.2975 2.9923")
    close(lse[1], "-1.0 0.5298 1.4076 3.3766 3.1414 3.0553 2.6921 2.8913")


def test_last_rows():
    close(ROWS[0, 6, :7], ".1005 .1005 .0136 .0007 .0050 .0370 .7427")
    close(ROWS[0, 7], ".0068 .1364 .2248 .0112 .2248 .0068 .0185 .3707")
    close(ROWS[1, 6, :7], ".1117 .0677 .1117 .5005 .0151 .1841 .0092")
    close(ROWS[1, 7], ".0204 .0555 .4101 .0204 .0555 .4101 .0204 .0075")


def test_column_sums():
    close(column_sums(ROWS, 2, "mean")[0], "2.2610 3.2345 .9244 .1553 .2314 .0615 .7612 .3707")
    close(column_sums(ROWS, 2, "mean")[1], "3.3861 .9783 1.3897 .5781 1.0190 .6116 .0296 .0075")
    mean = column_sums(ROWS, 1, "mean")[0]
    close(mean, "2.8236 2.1064 1.1571 .3667 .6252 .3365 .3954 .1891")
    assert float(mean.sum()) == pytest.approx(8.0)
    by_rows = grouped(normalised_sums(ROWS), 1, "mean")[0]
    close(by_rows, ".3529 .3009 .1928 .0733 .1563 .1122 .1977 .1891")


def test_window_votes_and_pooling():
    window = ROWS[:, -2:, :6]
    close(column_sums(window, 2, "mean")[0], ".1073 .2369 .2384 .0119 .2298 .0438")
    close(column_sums(window, 2, "mean")[1], ".1321 .1232 .5218 .5209 .0706 .5942")
    votes = column_sums(window, 1, "mean")[0].tolist()
    close(votes, ".1197 .1801 .3801 .2664 .1502 .3190")
    close(pooled(votes, "avg", 3), ".0999 .2266 .2755 .2656 .2452 .1564")
    close(pooled(votes, "max", 3), ".1801 .3801 .3801 .3801 .3190 .3190")


def test_maxima_and_last_row():
    close(column_maxima(ROWS[:, -2:, :6], 1)[0], ".1117 .1364 .4101 .5005 .2248 .4101")
    last = grouped(ROWS[:, -1], 1, "layer_mean")[0]
    close(last, ".0136 .0959 .3175 .0158 .1402 .2085 .0194 .1891")


# ------------------------------------------------------------------ 20.3: kept sets, budget 4


def test_h2o():
    mean = column_sums(ROWS, 1, "mean")[0]
    assert kept(mean, 4, recent=2) == [0, 1, 6, 7]
    by_head = column_sums(ROWS, 2, "mean")
    assert [kept(row, 4, recent=2)[:2] for row in by_head] == [[0, 1], [0, 2]]


def test_observed_attention():
    assert kept(grouped(normalised_sums(ROWS), 1, "mean")[0], 4) == [0, 1, 2, 6]


@pytest.mark.parametrize(
    ("pool", "kernel", "expected_set"),
    [("none", 1, [2, 5, 6, 7]), ("avg", 3, [2, 3, 6, 7]), ("max", 3, [2, 3, 6, 7])],
)
def test_snapkv(pool, kernel, expected_set):
    votes = column_sums(ROWS[:, -2:, :6], 1, "mean")[0].tolist()
    assert kept(pooled(votes, pool, kernel), 4, recent=2) == expected_set


def test_snapkv_by_query_head():
    votes = column_sums(ROWS[:, -2:, :6], 2, "mean")
    picked = [kept(pooled(row.tolist(), "avg", 3), 4, recent=2)[:2] for row in votes]
    assert picked == [[1, 2], [2, 4]]


def test_streaming():
    plan = make_plans(SimpleNamespace(name="streaming", sinks=1), 4, 1, 8)[0]
    assert (plan.sinks, plan.recent) == (1, 3)
    assert [*range(plan.sinks), *range(8 - plan.recent, 8)] == [0, 5, 6, 7]


def test_tova():
    assert kept(grouped(ROWS[:, -1], 1, "layer_mean")[0], 4) == [2, 4, 5, 7]


def test_keyformer():
    h, i, j = torch.meshgrid(torch.arange(2), torch.arange(8), torch.arange(8), indexing="ij")
    noise = ((3 * h + 5 * i + 7 * j) % 5 - 2).double() / 2
    sums = column_sums(perturbed(LOGITS, noise, 1.0), 2, "mean")
    close(sums[0], "1.4144 3.0961 1.9344 .0837 .1831 .0217 .7991 .4673")
    close(sums[1], "3.7836 .4510 1.2513 .8557 .9058 .7388 .0077 .0060")
    assert [kept(row, 4, recent=2) for row in sums] == [[1, 2, 6, 7], [0, 2, 6, 7]]


def test_scissorhands():
    low = low_counts(ROWS[:, -3:], VISIBLE[:, -3:], 2, "sum")
    close(low[0, :6], "3 1 2 3 2 3")
    close(low[1, :6], "3 3 2 2 2 1")
    assert [kept(-row, 4, recent=2) for row in low] == [[1, 4, 6, 7], [4, 5, 6, 7]]


def test_pyramidinfer():
    tail = pyramidinfer.tail_scores(ROWS[:, -2:, :6], distance_weight=1.2)
    close(tail, ".0612 .0996 .2218 .1348 .0891 .1803")
    assert pyramidinfer.keep_context(tail, keep=3, sinks=1) == [0, 2, 5]


def test_criticalkv():
    base = column_sums(ROWS[:, -2:, :6], 1, "mean")[0] / 2
    close(base, ".0599 .0900 .1901 .1332 .0751 .1595")
    w_o = torch.cat([torch.eye(4, dtype=torch.float64)] * 2, 1)  # I for each query head
    norms = values.projected_norms(VALUES[None, :6], w_o, 2)[0]
    close(norms, "6 4 6 4 6 3")
    close((base + 1e-4) * norms, ".3597 .3605 1.1409 .5332 .4513 .4788")
    half = Fraction(1, 2)
    assert two_stages(scores(base), scores(norms), 2, half, 1e-4) == {2, 3}
    assert two_stages(scores(base), scores(norms), 1, half, 1e-4) == {2}  # first stage: none


def test_projected_norms_of_a_real_projection():
    """Blocks of W_O against one head at a time through the whole matrix."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    w_o = torch.randn(7, 24, generator=generator, dtype=torch.float64)  # 6 query heads
    norms = torch.zeros(2, 5, dtype=torch.float64)
    for head in range(6):
        alone = torch.zeros(5, 24, dtype=torch.float64)
        alone[:, 4 * head : 4 * head + 4] = v[head // 3]
        norms[head // 3] += (alone @ w_o.T).abs().sum(-1) / 3
    torch.testing.assert_close(values.projected_norms(v, w_o, 6), norms)


def test_expected():
    queries, z = QUERIES[:, 1:8], []
    for q in queries:
        mean, covariance = expected.moments(q)
        z.append(expected.log_expectation(PROMPT[1:], mean, covariance, SCALE))
    close(expected.moments(queries[0])[0], "-.5714 -.4286 .7143 .4286")
    close(expected.moments(queries[1])[0], ".7143 .5714 .7143 .1429")
    close(z[0], "4.0612 1.7092 1.0357 -.3061 1.6582 1.9541 1.8010")
    close(z[1], "1.1224 1.3367 .7398 1.25 3.2806 2.1786 -.1480")
    p = expected.probability(PROMPT, queries, 1, SCALE, rotation=None)
    ranking = p * values.norms(VALUES[:8])
    close(ranking[1:], "1.0494 .2256 .0930 .1268 .6785 .1865 .1171")
    assert sorted({0} | {j + 1 for j in top(scores(ranking[1:]), 3)}) == [0, 1, 2, 5]


def test_mean_rotation_is_the_mean_of_rotations():
    x = torch.randn(1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turned = rotated(x.expand(1, 6, 8), torch.arange(11, 17), 10_000.0).mean(1)
    matrix = expected.mean_rotation(8, 10_000.0, 11, 6)
    torch.testing.assert_close(matrix @ x[0, 0], turned[0])


def test_kvzip():
    ranking = column_maxima(ROWS[:, -2:, :6], 1)[0]
    assert top(scores(ranking), 3) == {2, 3, 5}
    assert official_threshold(ranking.tolist(), 0.5) == {3}


def test_keydiff():
    close(keys.anchor(PROMPT), "-.0208 -.0625 .0861 .1420")
    cosines = keys.anchor_cosines(PROMPT)
    close(-cosines, "-.9264 -.8716 -.5839 .4348 .8900 -.1269 -.3721 .1269")
    assert kept(-cosines, 4) == [3, 4, 5, 7]


def test_quest():
    for q, wanted, largest in (
        (QUERIES[0, 8], "8 7 3 2", "5 4 2 -2"),
        (QUERIES[1, 8], "4 2 1 1", "4 2 1 1"),
    ):
        close(quest.page_bounds(q, PROMPT, 2), wanted)
        close((PROMPT @ q).view(4, 2).amax(1), largest)


def test_quest_pages():
    bounds = torch.stack([quest.page_bounds(QUERIES[h, 8], PROMPT, 2) for h in (0, 1)])
    assert quest.select_pages(bounds, 2) == [0, 3]
    assert quest.select_pages(bounds, 3) == [0, 1, 3]
    assert quest.select_pages(bounds, 4) == [0, 1, 2, 3]
    everything = list(range(8))
    assert quest.attended(QUERIES[:, 8], PROMPT, everything, 2, 8) == everything
    assert quest.attended(QUERIES[:, 8], PROMPT, everything, 2, 6) == [0, 1, 2, 3, 6, 7]


@pytest.mark.parametrize("mix", [0.07, 0.1])
def test_rkv(mix):
    votes = rkv.importance(QUERIES[:, 6:8], PROMPT, 2, SCALE)
    close(votes, ".1454 .1972 .1933 .1454 .1055 .2132")
    close(pooled(votes.tolist(), "max", 3), ".1972 .1972 .1972 .1933 .2132 .2132")
    ranking = rkv.ranking(QUERIES[:, 6:8], PROMPT, 2, SCALE, 3, 0.5, mix)
    assert kept(ranking, 4, recent=2) == [3, 4, 6, 7]


def test_redundancy():
    """Ours excuses nobody where there is no neighbour; the released code then excuses token 0."""
    close(keys.redundancy(PROMPT, 0.5), ".1475 .1213 .1253 .1157 .1066 .1279 .1336 .1222")
    close(excused(0).mean(0).softmax(0), ".1590 .1196 .1236 .1141 .1052 .1261 .1318 .1205")
    close(excused(None).mean(0)[:1], ".0405")
    close(excused(0).mean(0)[:1], ".1295")


def excused(without: int | None):
    """Cosines [8, 8] less those to each row's newest neighbour, or to `without` if it has none."""
    unit = PROMPT / PROMPT.norm(dim=-1, keepdim=True)
    cosine = (unit @ unit.T).fill_diagonal_(0.0)
    for i, row in enumerate(cosine.clone()):
        near = (row > 0.5).nonzero().flatten().tolist() or [without]
        if near[-1] is not None:
            cosine[i, near[-1]] = 0.0
    return cosine


# ------------------------------------------------------------------ Ada-KV


def ada_scores():
    """A0 and A1 as two KV heads, mean of the two window rows, keys before the window."""
    rows = ROWS[:, -2:, :6].mean(1)
    close(rows[0], ".0537 .1184 .1192 .0059 .1149 .0219")
    close(rows[1], ".0660 .0616 .2609 .2605 .0353 .2971")
    return [scores(row) for row in rows]


def test_adakv_shares():
    assert shares(ada_scores(), 4) == [1, 3]
    assert official(ada_scores(), 2, 0.2) == [1, 2]  # one lost
    assert official(ada_scores(), 2, 0.5) == [2, 2]


def test_adakv_exact():
    caps = mixed(ada_scores(), 2, Fraction(1, 5))
    assert caps == [1, 3]
    picked = [top(head, cap) for head, cap in zip(ada_scores(), caps, strict=True)]
    assert picked == [{2}, {2, 3, 5}]
    assert mixed(ada_scores(), 2, Fraction(1)) == [2, 2]
    assert mixed(ada_scores(), 2, Fraction(1, 2)) == [2, 2]  # 1.5, 2.5: the tie to the lower head


def test_adakv_safeguard():
    assert safeguarded(ada_scores(), 2, Fraction(1, 5)) == [1, 3]  # int(0.4): none is safe
    assert safeguarded(ada_scores(), 2, Fraction(1)) == [2, 2]
    lopsided = [scores([1, 2, 3]), scores([4, 5, 6])]
    assert safeguarded(lopsided, 2, Fraction(1, 2)) == [1, 3]
    assert safeguarded(lopsided, 2, Fraction(1, 5)) == [1, 3]
    assert mixed(lopsided, 2, Fraction(0)) == [1, 3]


def test_adakv_of_short_heads():
    """A head with fewer keys than its share keeps them all; nothing is lost."""
    heads = [scores([1.0]), scores([5, 6, 7, 8]), scores([2, 3, 4])]
    for floor in (Fraction(0), Fraction(1, 2), Fraction(1)):
        caps = mixed(heads, 2, floor)
        assert sum(caps) == 6
        assert all(cap <= len(head) for cap, head in zip(caps, heads, strict=True))


def test_adakv_normalised():
    head = scores([1, 2, 3, 4])
    assert normalised(head, 2) == pytest.approx({0: 0.7, 1: 1.4, 2: 2.1, 3: 2.8})


# ------------------------------------------------------------------ decode step with token 8


def test_h2o_decode_step():
    held = [0, 1, 6, 7, 8]
    rows = (SCALE * QUERIES[:, 8] @ KEYS[held].T).softmax(-1)
    close(rows[0], ".5990 .3633 .0181 .0181 .0015")
    close(rows[1], ".5804 .2135 .1295 .0476 .0289")
    acc = torch.cat([column_sums(ROWS, 1, "mean")[0, [0, 1, 6, 7]], torch.zeros(1)]) + rows.mean(0)
    close(acc, "3.4133 2.3948 .4692 .2220 .0152")
    assert held[int(acc[:3].argmin())] == 6  # 7 and 8 are protected


def test_tova_decode_step():
    held = [2, 4, 5, 7, 8]
    row = (SCALE * QUERIES[:, 8] @ KEYS[held].T).softmax(-1).mean(0)
    close(row, ".2620 .0233 .5284 .1285 .0578")
    assert held[int(row.argmin())] == 4


# ------------------------------------------------------------------ 20.4: arithmetic


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(20, [8, 6, 4, 2]), (8, [6, 5, 4, 3]), (7, [4] * 4), (5, [4] * 4)]
)
def test_pyramid_official(tokens, wanted):
    """At T = 5 < C the layer is dense: 6 slots for 5 tokens."""
    assert [n - 2 for n in pyramid.official(4, 6, 2, 20, tokens)] == wanted


def test_pyramid_exact():
    assert [n - 2 for n in pyramid.exact(4, 6, 2, 20, 20)] == [8, 5, 3, 0]


def test_pyramid_of_32_layers():
    counts = [n - 8 for n in pyramid.official(32, 128, 8, 20, 8000)]
    assert (counts[0], counts[-1], sum(counts)) == (234, 17, 4016)
    assert pyramid.official(32, 2048, 8, 20, 4079) == [2048] * 32
    counts = [n - 8 for n in pyramid.official(32, 2048, 8, 20, 4080)]
    assert (counts[0], counts[1], counts[-1]) == (3978, 3853, 103)


@pytest.mark.parametrize(
    ("layers", "slots", "mean"),
    [
        (32, 64, 71.5), (32, 96, 102.5), (32, 128, 133.5), (32, 256, 259.5), (32, 512, 526.0),
        (32, 1024, 1029.0), (32, 2048, 2048.5), (80, 64, 78.5), (80, 96, 101.0), (80, 128, 163.0),
        (80, 256, 294.5), (80, 512, 517.0), (80, 1024, 1042.0), (80, 2048, 2050.5),
    ],
)  # fmt: skip
def test_pyramid_official_is_over_budget(layers, slots, mean):
    assert sum(pyramid.official(layers, slots, 8, 20, 8000)) / layers == mean
    assert sum(pyramid.exact(layers, slots, 8, 20, 8000)) == layers * slots


def test_pyramidinfer_schedule():
    held = pyramidinfer.layer_tokens(4, 20, recent=4, decay=0.5, min_context=0)
    assert held[:4] == [20, 20, 18, 14]
    assert held[4] - 5 == 5  # context after the last prune


def test_pyramidinfer_released_configurations():
    """Share of the KV that the released settings keep of 2048 tokens, mean and last layer."""
    for layers, decay, interval, mean, last in (
        (32, 0.9, 1, 76.5, 37.5),
        (40, 0.8, 2, 72.3, 30.1),
        (80, 0.9, 3, 78.0, 40.1),
    ):
        held = pyramidinfer.layer_tokens(layers, 2048, int(0.2 * 2048), decay, 64, interval)
        assert 100 * sum(held[:layers]) / layers / 2048 == pytest.approx(mean, abs=0.06)
        assert 100 * held[layers - 1] / 2048 == pytest.approx(last, abs=0.06)
    assert pyramidinfer.layer_tokens(32, 2048, 409, 0.9, 64)[:4] == [2048, 2048, 2047, 2045]


def test_h2o_and_keyformer_budgets():
    h2o = SimpleNamespace(name="h2o", heavy_fraction=0.5)
    plan = make_plans(h2o, 0.2, 1, 1000)[0]
    assert (plan.budget - plan.recent, plan.recent) == (100, 100)
    keyformer = SimpleNamespace(name="keyformer", recent_fraction=0.3)
    plan = make_plans(keyformer, 0.6, 1, 20)[0]
    assert (plan.budget, plan.recent, plan.budget - plan.recent) == (12, 3, 9)


def test_average_pooling_counts_its_padding():
    assert pooled([3.0, 0.0, 0.0], "avg", 3) == [1.0, 1.0, 0.0]
    assert pooled([3.0], "avg", 3) == [1.0]
