"""lm-eval over a tiny model: stock HFLM's numbers under `full`, a slow loop's under the others."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsekv
from sparsekv import lm_harness
from sparsekv.cli import APP
from sparsekv.hf.compat import cache_key
from sparsekv.lm_harness.batches import Wanted, make_batches
from sparsekv.policies import POLICIES, Planned, PyramidInfer, get_policy

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install sparsekv[eval]")
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

TEXT = "Every word of this text is short. " * 4
# Contexts of 1, 2 and many tokens; continuations that share all but the last token.
PAIRS = [
    (TEXT + "Is it?", " yes"),
    (TEXT + "Is it?", " yet"),
    (TEXT + "Is it?", " no"),
    (TEXT[:90], " and so on"),
    ("a", "b"),
    ("a", "bcd"),
    ("ab", "c"),
    (TEXT[5:39], "x"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Weights large enough that tokens differ in likelihood, and a cache of few tokens shows.
    return save_tiny_model(
        tmp_path_factory.mktemp("tiny"), num_hidden_layers=3, initializer_range=0.25
    )


@pytest.fixture(scope="module")
def sparse_class():
    lm_harness.register()
    lm_harness.register()
    return get_model("sparsekv")


def options(folder, **more):
    return {"pretrained": str(folder), "device": "cpu", "dtype": "float32", **more}


def instances(pairs):
    return [SimpleNamespace(args=pair, task_name="t") for pair in pairs]


def close(mine, other):
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    values = [torch.tensor([value for value, _ in x]) for x in (mine, other)]
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_full_is_stock_hflm(folder, sparse_class, batch):
    stock = HFLM(**options(folder)).loglikelihood(instances(PAIRS), disable_tqdm=True)
    ours = sparse_class(**options(folder, policy="full", batch_size=batch))
    close(ours.loglikelihood(instances(PAIRS), disable_tqdm=True), stock)


def test_long_contexts_are_cut_as_stock_hflm_cuts_them(folder, sparse_class):
    kwargs = options(folder, max_length=24)
    stock = HFLM(**kwargs).loglikelihood(instances(PAIRS), disable_tqdm=True)
    ours = sparse_class(**kwargs, policy="full")
    close(ours.loglikelihood(instances(PAIRS), disable_tqdm=True), stock)


def one_by_one(folder, policy, budget, pairs):
    """Log-likelihood of each pair by a cache of its own and single tokens, without sharing."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    sparsekv.patch(model, get_policy(policy).with_tokenizer(tokenizer), budget)
    answers = []
    for context, continuation in pairs:
        ids = tokenizer(context, return_tensors="pt")["input_ids"]
        targets = tokenizer(continuation)["input_ids"]
        cache, total, greedy = sparsekv.new_cache(model), 0.0, True
        with torch.no_grad():
            if ids.shape[1] > 1:
                model(ids[:, :-1], **{cache_key(model): cache})
                if policy == "kvzip":
                    sparsekv.compress(model, cache, ids[:, :-1])
            for token, target in zip([ids[:, -1:], *targets[:-1]], targets, strict=True):
                step = torch.as_tensor(token).reshape(1, 1)
                likely = model(step, **{cache_key(model): cache}).logits[0, -1].log_softmax(-1)
                total, greedy = total + likely[target].item(), greedy and likely.argmax() == target
        answers.append((total, bool(greedy)))
    return answers


# duo wants gates, planned a plan; pyramidinfer a budget that pays for its tail.
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"duo", "planned", "pyramidinfer"}))
def test_a_batch_scores_what_each_pair_scores_alone(folder, sparse_class, policy):
    alone = one_by_one(folder, policy, 24, PAIRS)
    ours = sparse_class(**options(folder, policy=policy, budget=24, batch_size=4))
    close(ours.loglikelihood(instances(PAIRS), disable_tqdm=True), alone)


def test_a_plan_and_gates_are_read_from_their_files(folder, sparse_class, tmp_path):
    shares = [[1, 5], [8, 8], [2, 0]]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"model": {"head_dim": None}, "shares": shares}))
    ours = sparse_class(**options(folder, policy="planned", plan=str(file), budget=24))
    alone = one_by_one(folder, Planned(shares=shares), 24, PAIRS)
    close(ours.loglikelihood(instances(PAIRS), disable_tqdm=True), alone)
    with pytest.raises(ValueError, match="expected plan with policy=planned, got 'snapkv'"):
        sparse_class(**options(folder, policy="snapkv", plan=str(file)))
    with pytest.raises(ValueError, match="expected gates with policy=duo, got 'snapkv'"):
        sparse_class(**options(folder, policy="snapkv", gates=str(file)))


def test_a_policy_without_padding_gets_rows_of_one_length(folder, sparse_class):
    pairs = [(TEXT[i:-1], " yes") for i in (0, 0, 7, 7, 30)] + [(TEXT[7:-1], " no")]
    policy = PyramidInfer(recent=0.25, sinks=1, min_context=0)
    alone = one_by_one(folder, policy, 0.95, pairs)
    ours = sparse_class(**options(folder, policy=policy, budget=0.95, batch_size=4))
    close(ours.loglikelihood(instances(pairs), disable_tqdm=True), alone)


def test_evicting_changes_scores(folder, sparse_class):
    """Else the harness would measure a dense cache, as one forward without a cache does."""
    pairs = instances(PAIRS[:4])
    ours = sparse_class(**options(folder, policy="streaming", budget=8))
    dense = sparse_class(**options(folder, policy="full"))
    sparse = ours.loglikelihood(pairs, disable_tqdm=True)
    for (a, _), (b, _) in zip(sparse, dense.loglikelihood(pairs, disable_tqdm=True), strict=True):
        assert abs(a - b) > 1e-3


def test_rolling_is_fed_token_by_token(folder, sparse_class):
    requests = [SimpleNamespace(args=(TEXT[:60],), task_name="t")]
    stock = HFLM(**options(folder, prefix_token_id=1)).loglikelihood_rolling(requests, True)
    full = sparse_class(**options(folder, prefix_token_id=1, policy="full"))
    assert full.loglikelihood_rolling(requests, True) == pytest.approx(stock, rel=1e-4)
    few = sparse_class(**options(folder, prefix_token_id=1, policy="streaming", budget=8))
    assert few.loglikelihood_rolling(requests, True) != pytest.approx(stock, rel=1e-4)


def test_generation_is_that_of_the_patched_model(folder, sparse_class):
    ours = sparse_class(**options(folder, policy="snapkv", budget=40, batch_size=2))
    arguments = {"until": ["\n"], "max_gen_toks": 12}
    prompts = [TEXT, TEXT[20:]]
    texts = ours.generate_until(instances([(p, arguments) for p in prompts]), disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    sparsekv.patch(model, "snapkv", 40)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = ours.tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        alone = ours.tokenizer.decode(out, skip_special_tokens=True)
        assert text == alone.split("\n")[0]


def test_what_cannot_be_served_is_refused(folder, sparse_class):
    with pytest.raises(ValueError, match="expected a number as batch_size"):
        sparse_class(**options(folder, batch_size="auto"))
    with pytest.raises(ValueError, match="expected"):
        sparse_class(**options(folder, policy="nothing"))
    ours = sparse_class(**options(folder, max_length=8))
    with pytest.raises(ValueError, match="1 to 8 tokens of continuation, got 1 and 9"):
        ours.loglikelihood(instances([("a", "b" * 9)]), disable_tqdm=True)


def write_tasks(folder):
    """A task of choices and one of generation, over two documents."""
    rows = [
        {"text": TEXT, "choices": ["yes", "no", "perhaps"], "label": 1},
        {"text": TEXT[3:], "choices": ["a", "b", "c"], "label": 0},
    ]
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    head = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files: {file}\ntest_split: train\n"
        'doc_to_text: "{{text}} Is it?"\n'
    )
    (folder / "choice.yaml").write_text(
        f"task: tiny_choice\n{head}output_type: multiple_choice\n"
        "doc_to_choice: choices\ndoc_to_target: label\nmetric_list:\n  - metric: acc\n"
    )
    (folder / "text.yaml").write_text(
        f"task: tiny_text\n{head}output_type: generate_until\ndoc_to_target: 'nothing'\n"
        "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 5\n  do_sample: false\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    return folder


def test_the_command_is_lm_evals_with_our_model_in_it(folder, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    argv = list(sys.argv)
    tasks = write_tasks(tmp_path)
    command = [
        "lm-eval", "--model", "sparsekv",
        "--model_args", f"pretrained={folder},policy=pyramid,budget=64,dtype=float32",
        "--tasks", "tiny_choice,tiny_text", "--include_path", str(tasks), "--device", "cpu",
        "--output_path", str(tmp_path / "out"), "--batch_size", "2", "--log_samples",
    ]  # fmt: skip
    APP(command, standalone_mode=False)
    assert sys.argv == argv
    (file,) = (tmp_path / "out").rglob("results_*.json")
    written = json.loads(file.read_text(encoding="utf-8"))
    assert set(written["results"]) == {"tiny_choice", "tiny_text"}
    assert 0 <= written["results"]["tiny_choice"]["acc,none"] <= 1
    (file,) = (tmp_path / "out").rglob("samples_tiny_choice_*.jsonl")
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    logged = {s["doc_id"]: [float(r[0][0]) for r in s["resps"]] for s in samples}
    pairs = [(TEXT + " Is it?", f" {choice}") for choice in ("yes", "no", "perhaps")]
    alone = [value for value, _ in one_by_one(folder, "pyramid", 64, pairs)]
    assert logged[0] == pytest.approx(alone, rel=1e-4)


def test_batches_hold_rows_once_and_contexts_whole():
    def wanted(*pairs):
        return [Wanted(i, tuple(c), tuple(a)) for i, (c, a) in enumerate(pairs)]

    pairs = [("abc", "x"), ("abc", "y"), ("abc", "xy"), ("ab", "x"), ("a", "x"), ("xyz", "x")]
    batches = list(make_batches(wanted(*pairs), 3, alike=False))
    assert [batch.contexts for batch in batches] == [
        (tuple("abc"), tuple("xyz")), (tuple("ab"),), (tuple("a"),),
    ]  # fmt: skip
    first = batches[0]
    assert first.fed == ((), ("x",), ()) and first.context_of == (0, 0, 1)
    assert first.row_of == (0, 0, 1, 2) and [one.number for one in first.wanted] == [0, 1, 2, 5]
    alone = list(make_batches(wanted(*pairs), 1, alike=False))
    assert len(alone[0].fed) == 2, "a context is not torn apart"
    alike = list(make_batches(wanted(*pairs), 9, alike=True))
    assert [{len(c) for c in batch.contexts} for batch in alike] == [{3}, {2}, {1}]
