"""Tables: a golden one, worked out by hand, and what must hold of all of them."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace

import pytest

from sparsekv.evaluation.cells import collect, common, merged
from sparsekv.evaluation.frontier import Point, frontier, points
from sparsekv.evaluation.lines import averages, lines
from sparsekv.evaluation.plots import draw_frontier
from sparsekv.evaluation.records import Record
from sparsekv.evaluation.results import Results
from sparsekv.evaluation.table import as_csv, markdown, write

AWARE = "question-aware"
MIB = 1 << 20


def records(task, policy, budget, values, metric="em", **more):
    """values: by context, by question."""
    costs = {"kept": 40.0, "kv_bytes": 2 * MIB, "dense_kv_bytes": 8 * MIB, "prefill_ms": 3.0}
    if policy == "full":
        costs |= {"kept": 160.0, "kv_bytes": 8 * MIB}
    made = Record(task, policy, budget, AWARE, headline=metric, decode_ms=1.0)
    return [
        replace(made, example=f"e{i}", question=f"q{j}", **{**costs, **more, metric: value})
        for i, row in enumerate(values)
        for j, value in enumerate(row)
    ]


# Context 0 loses one of two answers, context 1 both: the mean falls by 3/4, and a draw that takes
# one context twice by 1/2 or 1.
DENSE = records("t", "full", None, [[1.0, 1.0], [1.0, 1.0]])
SNAP = records("t", "snapkv", 64, [[1.0, 0.0], [0.0, 0.0]])
LM = [
    *records("lm", "full", None, [[2.0], [3.0]], "nll"),
    *records("lm", "snapkv", 64, [[2.5], [3.5]], "nll", note="a | note"),
]
REFUSED = [Record("t", "duo", 64, AWARE, refused="expected gates, got none")]

GOLDEN = """\
## average, question-aware

6 questions, 4 contexts.

Mean over the tasks that are no controls: em, acc, mc and scores as they are, NLL as the ratio of
perplexities exp(nll of dense - nll).

| policy | budget | score | Δ dense | kept | KV MiB | ratio | prefill ms | decode ms | note |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| full | all | 1.000 |  | 160 | 8.00 | 1.000 | 3.0 | 1.0 |  |
| snapkv | 64 | 0.428 | -0.572 [-0.697, -0.447] | 40 | 2.00 | 0.250 | 3.0 | 1.0 |  |
| duo | 64 |  |  |  |  |  |  |  | refused: expected gates, got none |

## t, question-aware

4 questions, 2 contexts.

| policy | budget | em | Δ dense | kept | KV MiB | ratio | prefill ms | decode ms | note |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| full | all | 1.000 |  | 160 | 8.00 | 1.000 | 3.0 | 1.0 |  |
| snapkv | 64 | 0.250 | -0.750 [-1.000, -0.500] | 40 | 2.00 | 0.250 | 3.0 | 1.0 |  |
| duo | 64 |  |  |  |  |  |  |  | refused: expected gates, got none |

## lm, question-aware

2 questions, 2 contexts.

| policy | budget | nll | Δ dense | kept | KV MiB | ratio | prefill ms | decode ms | note |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| full | all | 2.500 |  | 160 | 8.00 | 1.000 | 3.0 | 1.0 |  |
| snapkv | 64 | 3.000 | +0.500 [+0.500, +0.500] | 40 | 2.00 | 0.250 | 3.0 | 1.0 | a \\| note |
"""


def test_golden_table():
    cells = collect([*DENSE, *SNAP, *LM, *REFUSED])
    text = markdown([*averages(cells), *lines(cells)])
    assert text[text.index("## average") :] == GOLDEN


def test_the_average_by_hand():
    """(0.25 + exp(-0.5)) / 2, and the ends where a draw loses 1/2 or 1 of the first task."""
    cells = collect([*DENSE, *SNAP, *LM])
    dense, snap = averages(cells)
    ratio = math.exp(-0.5)
    assert dense.value == 1.0 and dense.difference is None
    assert snap.value == pytest.approx((0.25 + ratio) / 2)
    assert snap.low == pytest.approx((0.0 + ratio) / 2 - 1)
    assert snap.high == pytest.approx((0.5 + ratio) / 2 - 1)
    assert (snap.tasks, snap.items, snap.contexts) == (2, 6, 4)


def test_controls_stay_out_of_the_average():
    control = [replace(r, task="c", control=True, em=0.0) for r in [*DENSE, *SNAP]]
    without, having = (averages(collect(r)) for r in ([*DENSE, *SNAP], [*DENSE, *SNAP, *control]))
    assert without == having
    assert "a control: it must not drop" in markdown(lines(collect(control)))


def test_common_questions():
    """Of a task what all its settings have answered; other tasks and refusals are left alone."""
    cells = common(collect([*DENSE[1:], *SNAP[:3], *LM, *REFUSED]))
    kept = {key: sorted(cell.items) for key, cell in cells.items() if key[0] == "t"}
    both = [("e0", "q1"), ("e1", "q0")]
    assert list(kept.values()) == [both, both, []]
    assert [line.items for line in lines(cells) if line.task == "lm"] == [2, 2]
    dense, snap = (line for line in lines(cells) if line.task == "t" and line.refused is None)
    assert (dense.value, snap.value, snap.contexts) == (1.0, 0.0, 2)
    with pytest.raises(ValueError, match="expected a question of t that every setting has"):
        common(collect([*DENSE[:1], *SNAP[1:]]))


def test_differences_are_over_the_same_questions():
    """A run that was stopped: what only one of both has answered does not count."""
    (line,) = [x for x in lines(collect([*DENSE[:3], *SNAP])) if x.policy == "snapkv"]
    assert line.value == 0.25 and line.items == 4
    assert line.difference == pytest.approx((0 - 1 - 1) / 3)
    (line,) = lines(collect(SNAP))
    assert line.difference is None and averages(collect(SNAP)) == []


def test_a_refusal_beside_results_is_a_refusal():
    late = [*DENSE, *SNAP[:2], Record("t", "snapkv", 64, AWARE, refused="expected x, got y")]
    (line,) = [x for x in lines(collect(late)) if x.policy == "snapkv"]
    assert line.value is None and line.refused == "expected x, got y"


def test_an_average_says_which_tasks_it_lacks():
    refused = Record("lm", "snapkv", 64, AWARE, refused="expected x, got y")
    average = averages(collect([*DENSE, *SNAP, *LM[:2], refused]))[1]
    assert (average.tasks, average.value) == (1, 0.25)
    assert average.note == "without lm, which it refused"
    assert [p.policy for p in points(averages(collect([*DENSE, *SNAP, *LM[:2], refused])))] == [
        "full"
    ]


def test_csv_has_every_line_and_field():
    every = lines(collect([*DENSE, *SNAP, *REFUSED]))
    rows = list(csv.DictReader(io.StringIO(as_csv(every))))
    assert [row["policy"] for row in rows] == ["full", "snapkv", "duo"]
    assert rows[1]["value"] == "0.25" and rows[1]["difference"] == "-0.75"
    assert rows[2]["value"] == "" and rows[2]["refused"] == "expected gates, got none"


def test_shards_are_merged(tmp_path):
    """Each has the dense cache, which counts once."""
    config = {"model": "m", "seed": 0, "samples": {"t": 2}, "data": "x", "dtype": "bfloat16"}
    for name, more in (("one", SNAP), ("two", [replace(r, policy="h2o") for r in SNAP])):
        with Results(tmp_path / name, config) as results:
            results.add([*DENSE, *more])
    folders = [tmp_path / "one", tmp_path / "two"]
    cells, configs = merged(folders)
    assert len(configs) == 2
    assert {cell.policy: len(cell.items) for cell in cells.values()} == {
        "full": 4, "snapkv": 4, "h2o": 4,
    }  # fmt: skip
    markdown_file, csv_file = write(cells, configs, tmp_path / "out")
    assert "| h2o | 64 | 0.250 |" in markdown_file.read_text()
    assert csv_file.read_text().count("\n") == 7


@pytest.mark.parametrize("name", ["model", "seed", "samples", "data", "dtype"])
def test_folders_of_other_items_are_not_merged(tmp_path, name):
    config = {"model": "m", "seed": 0, "samples": {"t": 2}, "data": "x", "dtype": "bfloat16"}
    other = config | {name: {"t": 3} if name == "samples" else "other"}
    for folder, own in (("one", config), ("two", other)):
        with Results(tmp_path / folder, own) as results:
            results.add(DENSE)
    with pytest.raises(ValueError, match=f"expected folders of one {name}"):
        merged([tmp_path / "one", tmp_path / "two"])


def point(policy, ratio, score):
    return Point(AWARE, policy, 64, ratio, score, score - 0.1, score + 0.1)


def test_the_frontier_is_what_nothing_dominates():
    every = [point("a", 0.5, 0.8), point("b", 0.1, 0.3), point("c", 0.5, 0.6), point("d", 0.3, 0.3)]
    every += [point("full", 1.0, 0.7), point("e", 0.1, 0.2)]
    assert [p.policy for p in frontier(every)] == ["b", "a"]


def test_the_frontier_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    cells = collect([*DENSE, *SNAP, *LM])
    out = draw_frontier(points(averages(cells)), "title", tmp_path / "f.png")
    assert out.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="expected averages to draw, got none"):
        draw_frontier([], "title", out)


def test_one_context_has_no_interval():
    """Draws of one context are all the same, which is no certainty."""
    one = [r for r in [*DENSE, *SNAP] if r.example == "e0"]
    (line,) = [x for x in lines(collect(one)) if x.policy == "snapkv"]
    assert (line.difference, line.low, line.high) == (-0.5, None, None)
    average = averages(collect([*one, *LM]))[1]
    assert average.difference is not None and (average.low, average.high) == (None, None)
    assert "| -0.500 | 40 |" in markdown([line])
    (found,) = [p for p in points(averages(collect(one))) if p.policy == "snapkv"]
    assert found.low == found.score == found.high == 0.5


def test_what_is_unfinished_says_so():
    """Of a run that was stopped, or of shards: a mean over other questions than its neighbour's."""
    (line,) = [x for x in lines(collect([*DENSE, *SNAP[:3]])) if x.policy == "snapkv"]
    assert line.note == "3 of 4 questions"
    dense, snap = averages(collect([*DENSE, *SNAP[:3], *LM[:2]]))
    assert dense.note == ""
    assert snap.note == "without lm, which is not measured; unfinished: t (3 of 4 questions)"
    late = [*DENSE, *SNAP, *LM[:2], replace(LM[2], note="a | note")]
    assert [x.note for x in lines(collect(late))][-1] == "1 of 2 questions; a | note"
    alone = averages(collect([*DENSE, *SNAP, *LM[2:]]))[1]  # no dense cache beside lm
    assert alone.note == "without lm, which is not measured" and alone.items == 4
