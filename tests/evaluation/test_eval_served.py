"""A server asked: what it is sent, what counts, and a table of two servers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from completions_server import Server, serving
from eval_rig import made_up
from typer.testing import CliRunner, Result

from sparsekv import cli, completions
from sparsekv.evaluation.cells import merged
from sparsekv.evaluation.records import Record
from sparsekv.evaluation.results import read_records
from sparsekv.evaluation.served import Served, answered, asks, check_task


class Answering:
    """Knows the answer to every prompt of a task; `wrong`: of these the last token is another."""

    def __init__(self, wanted: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self.wanted, self.wrong, self.tells = wanted, set(), True

    def __call__(self, body: dict[str, Any], to: Any) -> None:
        ids = list(self.wanted[tuple(body["prompt"])])
        if tuple(body["prompt"]) in self.wrong:
            ids[-1] += 1
        to.start(200)
        choice = {"text": "four", "token_ids": ids if self.tells else None}
        to.wfile.write(json.dumps({"choices": [choice]}).encode())


def ask(server: Server, task: Any, done: Any = ()) -> list[Record]:
    about = Served("layersplit", 64, "m", 0)

    async def all_of_it() -> list[Record]:
        async with completions.Server(server.url, None, "k") as client:
            return [record async for record in answered(client, task, about, done, 2)]

    return asyncio.run(all_of_it())


def test_fixed_answers() -> None:
    """The last token of a question is left to the model, and must be right, too."""
    task = made_up()
    every = asks(task)
    answering = Answering({a.prompt: a.wanted for a in every})
    first, question = task.examples[0], task.examples[0].questions[0]
    assert every[0].prompt == first.context + question.prompt[:-1]
    assert every[0].wanted == (question.prompt[-1], *question.answers[0])
    answering.wrong = {every[1].prompt, every[5].prompt}
    with serving(answering) as server:
        found = {(r.example, r.question): r for r in ask(server, task)}
        assert len(found) == len(every) == 9
        for i, one in enumerate(every):
            record = found[one.example, one.question]
            assert record.em == (i not in (1, 5)) and record.answer_tokens == len(one.wanted)
            assert record.right_tokens == len(one.wanted) - (i in (1, 5)) and record.decode_ms > 0
            assert (record.protocol, record.feed) == ("question-aware", "steps")
        sent = server.asked[0]
        assert sent["model"] == "first-model" and sent["temperature"] == 0 and sent["ignore_eos"]
        assert sent["key"] == "Bearer k" and sent["return_token_ids"] is True
        some = [record.key for record in found.values()][:7]
        assert len(ask(server, task, some)) == 2  # what is done is not asked again


def test_generated_texts() -> None:
    task = made_up("generated")
    every = asks(task)
    assert every[0].prompt == task.examples[0].context + task.examples[0].questions[0].prompt
    with serving(Answering({a.prompt: (1, 2) for a in every})) as server:
        found = ask(server, task)
    assert {(r.text, r.score) for r in found} == {("four", 4.0)}
    assert server.asked[0]["max_tokens"] == 6 and "ignore_eos" not in server.asked[0]


def test_what_a_server_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="em or by generated text for a server, got made-up-choi"):
        check_task(made_up("choice"))


def test_a_server_that_does_not_tell_its_tokens() -> None:
    task = made_up()
    answering = Answering({a.prompt: a.wanted for a in asks(task)})
    answering.tells = False
    with serving(answering) as server, pytest.raises(RuntimeError, match="return_token_ids"):
        ask(server, task)


def call(server: Server, folder: Path, data: Path, out: Path, *more: str) -> Result:
    line = ["eval", "served", "--base-url", server.url, "--model", str(folder), "--samples", "2"]
    line += ["--data", str(data), "--tasks", "passkey-1k", "--out", str(out)]
    return CliRunner().invoke(cli.APP, [*line, *more])


def test_two_servers_in_a_table(folder: Path, data: Path, tmp_path: Path) -> None:
    """One dense, one that gets a question wrong; no bytes are known, and none are shown."""
    from transformers import AutoTokenizer

    from sparsekv.evaluation.example import Request
    from sparsekv.evaluation.tasks import TASKS

    request = Request(AutoTokenizer.from_pretrained(folder), data, 2, 0)
    every = asks(TASKS["passkey-1k"](request))
    answering = Answering({a.prompt: a.wanted for a in every})
    sparse = ("--policy", "layersplit", "--budget", "64")
    with serving(answering) as server:
        done = call(server, folder, data, tmp_path / "dense")
        assert done.exit_code == 0, done.output
        answering.wrong = {every[0].prompt}
        assert call(server, folder, data, tmp_path / "sparse", *sparse).exit_code == 0
        count = len(server.asked)
        assert call(server, folder, data, tmp_path / "sparse", *sparse, "--resume").exit_code == 0
        assert len(server.asked) == count == 2 * len(every)
    folders = [tmp_path / "dense", tmp_path / "sparse"]
    assert [sum(r.em or 0 for r in read_records(f)) for f in folders] == [count / 2, count / 2 - 1]
    merged(folders)
    line = ["eval", "table", *map(str, folders), "--out", str(tmp_path), "--against", "layersplit"]
    assert CliRunner().invoke(cli.APP, line).exit_code == 0
    text = (tmp_path / "table.md").read_text()
    assert f"| layersplit | 64 | {1 - 2 / count:.3f} | -{2 / count:.3f} [" in text
    assert "|  |  |  |  |" in text  # kept, MiB, ratio, prefill


def test_what_is_refused(folder: Path, data: Path, tmp_path: Path) -> None:
    with serving(lambda body, to: None) as server:
        for more, reason in (
            (("--policy", "layersplit"), "expected --budget with any --policy but full"),
            (("--tasks", "recall-1k"), "scored by acc"),
            (("--concurrency", "0"), "--concurrency >= 1"),
        ):
            done = call(server, folder, data, tmp_path, *more)
            assert done.exit_code == 2 and reason in " ".join(done.stderr.split())


def test_without_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(completions, "import_module", missing)
    with pytest.raises(ValueError, match="expected aiohttp for --base-url"):
        completions.Server("http://x/v1", None, None)
