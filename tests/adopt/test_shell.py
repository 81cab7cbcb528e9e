"""What is read of a shell script without running it; bash itself says what is right."""

from __future__ import annotations

import json
import subprocess

import pytest

from trnslurm.adopt.conditions import holds, matches
from trnslurm.adopt.shell import Block, Command, parsed, statements
from trnslurm.adopt.variables import Variables

WORDS = r"""
a 'b  c' "d e" f\ g 'h'"i"j # comment
k \
  l "m \
n" "\$x \q"
""".strip()


def by_bash(text: str) -> list[list[str]]:
    """The words of each line's command, by bash."""
    show = "show() { for w in \"$@\"; do printf '%s\\0' \"$w\"; done; printf '\\1'; }\n"
    lines = text.replace("\\\n", "\0").splitlines()
    script = show + "".join(f"show {line}\n" for line in lines).replace("\0", "\\\n")
    said = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode()
    return [line.split("\0")[:-1] for line in said.split("\1")[:-1]]


def test_words_are_those_of_bash() -> None:
    found = [[word.text for word in s.words] for s in statements(WORDS) if isinstance(s, Command)]
    assert found == by_bash(WORDS)


def test_commands_and_blocks() -> None:
    text = """
export A=1 B="x $A"; cd /x && ./run.sh 2>&1 | tee log &
if [ -z "$A" ]; then
  for i in 1 2; do echo $i; done
fi
f() { echo; }
cat <<'EOF' > file
if this is no condition
EOF
C=(a "b c")
C+=(d)
wait
"""
    found = statements(text)
    heads = [s.head if isinstance(s, Command) else "BLOCK" for s in found]
    assert heads == ["export", "cd", "./run.sh", "tee", "BLOCK", "BLOCK", "BLOCK", "", "", "wait"]
    assert [s.line for s in found] == [2, 2, 2, 2, 3, 6, 7, 10, 11, 12]
    run, tee = (s for s in found[2:4] if isinstance(s, Command))
    assert (run.after, tee.after, run.redirections) == ("&&", "|", ("2>&1",))
    assert isinstance(found[6], Block) and "no condition" in found[6].raw


VALUES = r"""
A=1; B="x $A"; C=${A:-9} D=${NONE:-"d $A"} E=$((A * 4 + 1))
F=(a "b c" $A); F+=("d")
G="one  two"
A=2
"""


@pytest.mark.parametrize(
    "word",
    [
        "$A",
        '"$B"',
        "$B",
        "$C-$D",
        "x$E",
        '"${F[@]}"',
        "$G",
        '"$G"',
        "--a=$G",
        '"$@"',
        "$1",
        "$NO",
        '"${B#x}"',
        "${B%% *}",
        "${A:+y}",
        "${NO:+y}",
        "${#F[@]}",
        "${F[1]}",
        '"${F[*]}"',
        "${F[$A-1]}",
        "${G/one/1}",
        "${G:1:3}",
        '"${G: -3}"',
        "${G^^}",
        '"${@:2}"',
        "$#",
        '"${@}"',
        '"<$*>"',
        r"$(expr 3 \\* $A)",
        "$(basename /a/b.c .c)",
        "$(dirname /a/b)",
        "$(seq 1 3)",
        "$(echo $B z | wc -w)",
        "`echo a,b | cut -d, -f2`",
        "$((A > 1 && A != 3))",
        "$((-7 + ${#F[@]}))",
        "$(echo a,b | tr , ' ')",
        "$(printf %s x)",
        '$(head -n 1 <<< "$B")',
        '"$(echo "$B")"',
    ],
)
def test_values_are_those_of_bash(word: str) -> None:
    variables = Variables({}, ["p q", "r"], {})
    for statement in statements(VALUES):
        assert isinstance(statement, Command)
        for name, value in statement.assignments:
            assert variables.assign(name, value)
    [command] = statements(f": {word}")
    assert isinstance(command, Command)
    found = ["".join(p.text for p in w.parts if p.kind == "text")
             for w in variables.words(command.words[1])]  # fmt: skip
    show = "printf '%s\\0' --"
    said = subprocess.run(["bash", "-c", f"{VALUES}\n{show} {word}", "-", "p q", "r"],
                          capture_output=True, check=True).stdout.decode()  # fmt: skip
    assert (found or [""]) == (said.split("\0")[1:-1] or [""]), json.dumps(said)


TESTS = [
    '[ -z "$NO" ]', '[ -n "$A" ]', '[ "$A" = 2 ]', '[[ $A == 3 ]]', "[ $A -gt 1 ]", "[ $A -eq 7 ]",
    '[ ! -z "$A" ]', "[[ $A != 2 ]]", 'test "$A" = 2',
    "[[ $A == [0-9] ]]", "[[ x$A == x* && $A != 3 ]]", "((A > 1))", "(( A == 3 || A > 5 ))",
    "[ $A = 1 ] || [ $A = 2 ]", "! [ $A = 2 ]", "[[ $A -gt 1 || $A -lt 0 ]]", "[[ a$A == a?c ]]",
    "case $A in 1|3) false;; [2-4]) true;; *) false;; esac",
]  # fmt: skip


@pytest.mark.parametrize("test", TESTS)
def test_tests_hold_as_in_bash(test: str) -> None:
    variables = Variables({}, [], {})
    variables.assign("A", _value("A=2"))
    done = subprocess.run(["bash", "-c", f"A=2; {test}"], check=False)
    found = statements(test)
    if isinstance(found[0], Block) and (case := parsed(found[0])) is not None:
        found = next(b.body for b in case.branches if matches(case.words[0], b.patterns, variables))
    assert holds(found, variables) is (done.returncode == 0)


def _value(text: str):
    [command] = statements(text)
    assert isinstance(command, Command)
    return command.assignments[0][1]


@pytest.mark.parametrize(
    "test", ["[ -f x ]", "[[ $UNKNOWN == x* ]]", "[ $UNKNOWN = 1 ] && true", "grep x"]
)
def test_what_only_the_job_knows_stays_open(test: str) -> None:
    variables = Variables({}, [], {})
    variables.forget("UNKNOWN")
    assert holds(statements(test), variables) is None


def test_branches() -> None:
    [block] = statements(
        "if [ 1 = 2 ]; then A=1; elif [ 1 = 1 ]; then if x; then y; fi; else B=1; fi"
    )
    assert isinstance(block, Block)
    found = parsed(block)
    assert found is not None and found.kind == "if"
    assert [len(branch.test) for branch in found.branches] == [1, 1, 0]
    assert isinstance(found.branches[1].body[0], Block)
    [loop] = statements("while read i; do x; done")
    assert isinstance(loop, Block) and parsed(loop) is None
