"""The command line, on a tiny random model: what it prints, what it writes, how it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny_model
from typer.testing import CliRunner, Result

import sparsekv
from sparsekv import cli, demo
from sparsekv.generation import encode
from sparsekv.models import load

PROMPT = "a quick brown fox jumps over the lazy dog, " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.APP, [str(argument) for argument in arguments])


def generate(folder: Path, *arguments: object) -> Result:
    return call("generate", "--model", folder, "--device", "cpu", *arguments)


def test_generate_compare_and_json(folder: Path, tmp_path: Path) -> None:
    """Both texts are printed; the file holds kept, bytes, tokens, texts and times."""
    out = tmp_path / "run.json"
    size = ["--prompt", PROMPT, "--budget", 40, "--policy", "snapkv", "--max-new-tokens", 5]
    result = generate(folder, *size, "--compare", "--json", out)
    assert result.exit_code == 0, result.output
    run = json.loads(out.read_text())
    assert result.stdout.startswith("--- dense\n") and "\n--- snapkv\n" in result.stdout
    assert run["sparse"]["text"] in result.stdout
    tokens = run["prompt_tokens"]
    assert tokens == len(PROMPT) + 2  # one a byte, and the chat template's two
    assert len(run["sparse"]["tokens"]) == len(run["dense"]["tokens"]) == 5
    after_prompt, cache = run["sparse"]["cache_after_prompt"], run["sparse"]["cache"]
    assert after_prompt["tokens_seen"] == [tokens]
    assert after_prompt["kept"] == {"min": 40, "mean": 40.0, "max": 40}
    assert cache["tokens_seen"] == [tokens + 4]  # the last token is never fed
    assert 0 < cache["kv_bytes"] < cache["dense_bytes"]
    assert run["sparse"]["prefill_s"] > 0 and run["dense"]["decode_s"] > 0
    assert f"kept 40 of {tokens} prompt tokens per head" in result.stderr


def test_generate_within_budget_is_dense(folder: Path, tmp_path: Path) -> None:
    """A prompt and its answer within the budget give the dense tokens."""
    file, out = tmp_path / "prompt.txt", tmp_path / "run.json"
    file.write_text(PROMPT)
    size = ["--prompt-file", file, "--budget", "1.0", "--max-new-tokens", 8, "--raw"]
    result = generate(folder, *size, "--policy", "snapkv", "--compare", "--json", out)
    assert result.exit_code == 0, result.output
    run = json.loads(out.read_text())
    assert run["prompt_tokens"] == len(PROMPT)  # --raw: no chat template
    assert run["sparse"]["tokens"] == run["dense"]["tokens"]


def test_generate_with_a_quantised_cache(folder: Path, tmp_path: Path) -> None:
    """The format is in the report; K and V take less than half of what they took."""
    size, runs = ["--prompt", PROMPT, "--budget", 40, "--max-new-tokens", 5], []
    for extra in ([], ["--kv-dtype", "int8"]):
        result = generate(folder, *size, *extra, "--json", tmp_path / "run.json")
        assert result.exit_code == 0, result.output
        runs.append(json.loads((tmp_path / "run.json").read_text())["sparse"]["cache"])
    assert [run["kv_dtype"] for run in runs] == [None, "int8"]
    assert runs[1]["dense_bytes"] == runs[0]["dense_bytes"]
    assert runs[1]["kv_bytes"] < runs[0]["kv_bytes"] / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "pyramids"], "expected a Policy or one of full, "),
        (["--budget", "0"], "expected budget"),
        (["--budget", "1.5"], "expected a float budget in (0, 1]"),
        (["--budget", "nan"], "expected a float budget in (0, 1]"),
        (["--budget", "many"], "expected a budget like 512 or 0.25, got 'many'"),
        (["--max-new-tokens", "0"], "expected --max-new-tokens >= 1, got 0"),
        (["--kv-dtype", "int3"], "expected kv_dtype to be None or one of"),
        (["--dtype", "int4"], "expected dtype to be one of auto, float32"),
        (["--prompt-file", "both"], "expected --prompt or --prompt-file, got both"),
        (["--prompt", "", "--raw"], "expected a prompt of at least one token"),
    ],
)
def test_mistakes_are_one_line(folder: Path, arguments: list[str], message: str) -> None:
    result = generate(folder, "--prompt", PROMPT, *arguments)
    assert_one_line(result, message)


def test_missing_files_are_one_line(tmp_path: Path) -> None:
    result = call("generate", "--prompt-file", tmp_path / "absent.txt")
    assert_one_line(result, "absent.txt': No such file or directory")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    result = call("generate", "--prompt-file", tmp_path / "latin.txt")
    assert_one_line(result, "expected a UTF-8 text file")
    result = call("generate", "--prompt", "x", "--json", tmp_path / "no" / "run.json")
    assert_one_line(result, "expected --json in a folder that exists")
    result = call("gates", "--model", tmp_path, "--out", tmp_path / "no" / "gates.json")
    assert_one_line(result, "expected --out in a folder that exists")
    result = call("generate", "--prompt", "x", "--model", tmp_path)
    assert_one_line(result, "expected a readable causal language model")
    assert_one_line(call("generate"), "expected --prompt or --prompt-file, got neither")


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["show-kept"], ["demo"]])
@pytest.mark.parametrize(("policy", "option"), [("duo", "gates"), ("planned", "plan")])
def test_policies_that_want_a_file_say_so_at_once(
    command: list[str], policy: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the command line, and before a model is loaded or a dense answer made."""
    monkeypatch.setattr(cli.models, "load", None)  # a call would raise TypeError
    wants = f"expected --{option} FILE with --policy {policy}, got none: `sparsekv {option} --out"
    assert_one_line(call(*command, "--policy", policy), wants)
    absent = call(*command, "--policy", policy, f"--{option}", tmp_path / "absent.json")
    assert_one_line(absent, f"expected --{option} to be a file, got none at ")


def test_what_cannot_be_written_to_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in place of a file, a file in place of a folder: before the work, not after it."""
    monkeypatch.setattr(cli.models, "load", None)
    file = tmp_path / "file"
    file.write_text("x")
    for command in (["generate", "--prompt", "x", "--json"], ["gates", "--out"], ["plan", "--out"]):
        result = call(*command, tmp_path)
        assert_one_line(result, f"expected {command[-1]} to be a file, got the folder")
    bench = ["bench", "cache", "--quick", "--device", "cpu", "--only", "append", "--out"]
    for command in (bench, ["diagnose", "massive", "--out"], ["diagnose", "attention", "--out"]):
        for out in (file, file / "folder"):
            assert_one_line(call(*command, out), "expected --out to be a folder to write to, got ")


def test_unsupported_model_is_one_line(tmp_path: Path) -> None:
    """What patch() refuses is reported like any other mistake."""
    folder = save_tiny_model(tmp_path, head_dim=20)
    result = generate(folder, "--prompt", PROMPT)
    assert_one_line(result, "head_dim")


def assert_one_line(result: Result, message: str) -> None:
    """The last line of stderr, after any progress, and nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == errors[0]


def test_usage_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option that does not exist goes through the real entry point."""
    monkeypatch.setattr(sys, "argv", ["sparsekv", "generate", "--bugdet", "3"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1 and "--bugdet" in errors


@pytest.mark.parametrize("command", [[], ["generate"], ["policies"], ["show-kept"], ["demo"]])
def test_help_has_an_example(command: list[str]) -> None:
    for option in ("-h", "--help"):
        result = call(*command, option)
        assert result.exit_code == 0
        assert " ".join(["sparsekv", *command]) in result.stdout and "Example" in result.stdout


def test_policies_lists_all() -> None:
    result = CliRunner().invoke(cli.APP, ["policies"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for name, policy in sparsekv.POLICIES.items():
        assert name in result.stdout and policy.paper.split(",")[0] in result.stdout
    assert "window=32" in result.stdout  # SnapKV's default


def test_version_from_a_shell() -> None:
    """The one test that starts a process: `python -m` reaches main()."""
    command = [sys.executable, "-m", "sparsekv", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"sparsekv {sparsekv.__version__}\n"


def test_demo_ends_with_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "prompt", lambda: PROMPT)
    result = call("demo", "--model", folder, "--budget", 32, "--device", "cpu")
    assert result.exit_code == 0, result.output
    last = result.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"kept 32 of \d+ prompt tokens per head \(\d+ %\) · KV [\d.]+ MiB -> [\d.]+ MiB"
        r" · dense answer: .* · sparse answer: .*",
        last,
    )


def test_demo_text_holds_the_answer_once() -> None:
    """On this Python's help text, too, the question can be answered from the text alone."""
    text = demo.prompt()
    assert text.count(demo.ANSWER) == 1 and demo.ANSWER not in demo.QUESTION


def test_encode_uses_the_chat_template(folder: Path) -> None:
    _, tokenizer = load(str(folder), "cpu")
    assert tokenizer.decode(encode(tokenizer, "hi")[0]) == "<u>hi<a>"
    assert tokenizer.decode(encode(tokenizer, "hi", chat=False)[0]) == "hi"
