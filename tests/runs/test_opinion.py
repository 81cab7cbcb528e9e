"""The second opinion: what a user's command gets of a run, and what becomes of its answer."""

from __future__ import annotations

import sys

import pytest

from trnslurm.errors import TrnslurmError
from trnslurm.runs.opinion import ask, extract, masked
from trnslurm.runs.status import choose_attempt

FAILED = {"state": "FAILED", "exit_code": 1, "job_id": "1002", "hosts": "node-1,node-2"}
LOG = "step 1 loss 2\nTraceback (most recent call last):\nKeyError: 'lr'\n"


@pytest.fixture
def failed(make_run):
    run = make_run(states={"train": [FAILED]}, phases=("train",), jobs={"train": "1002"})
    run.node_log("train", 1, 0).write_text("x\n" * 200)
    run.node_log("train", 1, 1).write_text(LOG)
    run.batch_log("train", "1002").write_text("srun: error: node-2: task 1: Exited\n")
    return run


def test_the_command_gets_the_last_words_and_is_quoted(failed, cli) -> None:
    # It counts what it gets, and answers in red.
    code = (
        "import sys; t = sys.stdin.read(); print(len(t) < 9000, '\\x1b[31mlr is missing\\x1b[0m')"
    )
    done = cli("triage", failed.name, "--ask", f'{sys.executable} -c "{code}"')
    assert done.code == 0
    assert done.out.startswith("triage: train attempt 1: ")
    assert done.out.endswith(" answers:\n  True lr is missing\n")


def test_what_is_given(failed) -> None:
    text = extract(failed, choose_attempt(failed, phase=None, attempt=None), None, {})
    assert "The last lines of logs/train-1-node0.log:\nx\n" in text and text.count("\nx\n") < 40
    assert text.endswith(
        "The last lines of logs/train-1002.log:\nsrun: error: node-2: task 1: Exited\n"
    )


@pytest.mark.parametrize(
    "secret",
    [
        "WANDB_API_KEY=S3cretS3cret", 'password: "S3cretS3cret"', "my-token = S3cretS3cret",
        "Authorization: Bearer S3cretS3cret", "https://ada:S3cretS3cret@git.example/x",
        "https://s3.example/a?X-Amz-Signature=S3cretS3cret", "hf_S3cretS3cretS3cret",
        "AKIAS3cretS3cretS3cr", "eyJhbGciOi.S3cretS3cret", "it said S3cretS3cret twice",
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_masked(secret: str) -> None:
    environ = {"ACME_TOKEN": "S3cretS3cret" if secret.startswith("it said") else "", "HOME": "/"}
    said = masked(f"before {secret} after", environ)
    assert "S3cret" not in said and "[masked]" in said
    assert said.startswith("before ") and said.endswith(" after")


def test_usual_lines_are_not_masked() -> None:
    line = "step 12 loss 2.31 tokens/s 4096 num_tokens=3 tokenizer=gpt2 /fsx/key/a.py:12"
    assert masked(line, {"HF_TOKEN": "", "PATH": "/bin", "KEY": "12"}) == line


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "--ask: expected a command"),
        ("'", "--ask ': No closing quotation"),
        ("/nowhere/llm", "--ask /nowhere/llm: No such file or directory"),
        (f"{sys.executable} -c 'import sys; sys.exit(\"no key\")'", "exit code 1: no key"),
        (f"{sys.executable} -c 'import time; time.sleep(60)'", "no answer within 1 s"),
    ],
)
def test_a_command_that_does_not_answer(command: str, says: str) -> None:
    with pytest.raises(TrnslurmError) as refused:
        ask(command, "text", limit_s=1)
    assert says in str(refused.value)


def test_text_only(failed, cli) -> None:
    assert "omit --json" in cli("triage", failed.name, "--json", "--ask", "cat").error
