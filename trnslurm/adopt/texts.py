"""The words of a batch script as strings, with placeholders, and with marks for unknown values."""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trnslurm.adopt.shell import Word
from trnslurm.adopt.variables import IF_GIVEN, WILDCARDS, Variables

# Within a string: a variable of the user's shell, what only the script's own shell knows, a number
# from Slurm, and an unset variable.
NAME, UNKNOWN, NUMBER, UNSET, END = "\ue000", "\ue001", "\ue004", "\ue005", "\ue002"
MARKED = re.compile(f"({NAME}|{UNKNOWN}|{NUMBER}|{UNSET})(.*?){END}", re.DOTALL)
# The placeholders that replace variables of the job in a script's arguments.
PLACES = {
    "SLURM_NNODES": "{nodes}", "SLURM_JOB_NUM_NODES": "{nodes}", "SLURM_NTASKS": "{workers}",
    "SLURM_NPROCS": "{workers}", "SLURM_NTASKS_PER_NODE": "{workers_per_node}",
    "SLURM_GPUS_ON_NODE": "{workers_per_node}", "SLURM_GPUS_PER_NODE": "{workers_per_node}",
    "SLURM_JOBNAME": "{name}", "SLURM_NODEID": "{node}", "MASTER_ADDR": "{master_addr}",
    "MASTER_PORT": "{master_port}", "SLURM_ARRAY_TASK_ID": "{task}", "SLURM_JOB_ID": "{run_id}",
    "SLURM_JOBID": "{run_id}", "SLURM_ARRAY_JOB_ID": "{run_id}",
}  # fmt: skip
# The directory of conda, which a job cannot query.
CONDA_BASE, CONDA = re.compile(r"[$`(]+conda info --base[)`]"), "%conda%"
# Variables that a job has, although it does not inherit the shell's environment.
IN_JOB = frozenset({"HOME", "USER", "PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH"})


class UnclearError(Exception):
    """The part of a statement that is not understood."""


def shell_word(text: str) -> str:
    """Return a string as a word for the shell, which expands the marked names."""
    words, at = "", 0
    for found in MARKED.finditer(text):
        words += shlex.quote(text[at : found.start()]) if found.start() > at else ""
        words += f'"${{{found[2]}}}"' if found[1] == NAME else shlex.quote(found[2])
        at = found.end()
    return words + (shlex.quote(text[at:]) if at < len(text) or not text else "")


def with_values(text: str, environ: Mapping[str, str]) -> str:
    """Return a string with the values that the marked names have in the user's shell."""
    return MARKED.sub(lambda found: environ.get(found[2], ""), text)


def as_script(word: Word) -> str:
    """Return a word as script text, in which variables belong to that script."""
    return "".join(f"${{{p.text}}}" if p.kind == "name" else p.text for p in word.parts)


def plain(text: str) -> str:
    """Return a string without its marks."""
    return MARKED.sub(r"\2", text)


class Texts:
    """Shell words as strings, with the known values of the script's variables substituted."""

    def __init__(
        self, variables: Variables, numbers: Mapping[str, int], environ: Mapping[str, str]
    ) -> None:
        self._variables, self._numbers, self._environ = variables, numbers, environ
        self.unset: set[str] = set()
        """Unset variables in strings that count."""

    def text(self, word: Word) -> str:
        """Return a word as an argument, with placeholders, and with marks for unknown values."""
        return self.joined(self._variables.expand(word))

    def texts(self, words: Sequence[Word]) -> list[str]:
        """Return words as arguments. A word can become more than one."""
        return [self.joined(each) for word in words for each in self._variables.words(word)]

    def joined(self, word: Word) -> str:
        """Return a word whose variables have been replaced."""
        text, stays = "", self._matches_no_file(word)
        for part in word.parts:
            if part.kind == "text":
                text += re.sub(r"\{([A-Za-z_]\w*)\}", r"{{\1}}", part.text)
            elif part.kind == "other" and part.text in WILDCARDS and stays:
                text += part.text
            elif part.kind == "other" or part.text in self._variables.computed:
                text += f"{UNKNOWN}{part.text}{END}"
            elif part.text in self._numbers:
                text += f"{NUMBER}{part.text}{END}"
            elif part.text in PLACES and part.text not in IF_GIVEN:
                text += PLACES[part.text]
            elif part.text in ("PWD", "SLURM_SUBMIT_DIR"):
                text += "."
            elif part.text in self._environ and not part.text.startswith("SLURM_"):
                text += f"{NAME}{part.text}{END}"
            elif self._variables.is_unset(part.text) and not self._variables.loads:
                text += f"{UNSET}{part.text}{END}"
            else:
                text += f"{UNKNOWN}${part.text}{END}"
        return text

    def _matches_no_file(self, word: Word) -> bool:
        """Check whether a word with wildcards stays unchanged because no file here matches it."""
        pattern = ""
        for part in word.parts:
            if part.kind == "other" and part.text in WILDCARDS:
                pattern += part.text
            elif (plain := self._variables.plain(Word("", (part,)))) is not None:
                pattern += glob.escape(plain)
            else:
                return False
        if not glob.has_magic(pattern):
            return False
        wild = [each for each in pattern.split("/") if glob.has_magic(each)]
        with suppress(ValueError, OSError):
            root = Path("/" if pattern.startswith("/") else ".")
            return len(wild) < 3 and next(root.glob(pattern.lstrip("/")), None) is None
        return False

    def shell(self, word: Word) -> str:
        """Return a word for a line of `activate`, in which only a few variables are known."""
        if all(p.kind == "text" or p.text in IN_JOB for p in word.parts):
            return word.raw
        text = ""
        for part in self._variables.expand(word).parts:
            if part.kind == "text":
                text += shlex.quote(part.text) if part.text else ""
            elif part.kind == "name" and part.text in IN_JOB:
                text += f'"${{{part.text}:-}}"'
            elif part.kind == "name" and part.text in self._environ:
                text += shlex.quote(self._environ[part.text])
            elif part.kind == "other" and CONDA_BASE.fullmatch(part.text):
                text += CONDA
            else:
                raise UnclearError(f"{part.text} is unknown in the job's environment")
        return text

    def counted(self, text: str) -> str:
        """Return a string with numbers filled in; record unset variables in `unset`."""
        return MARKED.sub(lambda found: self._settled(found, {}), text)

    def placed(self, text: str, each: int | None) -> str:
        """Return a string with placeholders instead, which stay correct on other nodes.

        `each` is the number of workers per node.
        """
        values = {"{nodes}": self._numbers["SLURM_NNODES"]}
        if each is not None:
            values |= {"{workers}": values["{nodes}"] * each, "{workers_per_node}": each}
        return MARKED.sub(lambda found: self._settled(found, values), text)

    def _settled(self, found: re.Match[str], values: Mapping[str, int]) -> str:
        mark, name = found.groups()
        if mark == NUMBER:
            place, number = PLACES.get(name, ""), self._numbers[name]
            return place if values.get(place) == number else str(number)
        if mark == UNSET:
            self.unset.add(name)
            return "" if name.startswith("SLURM") else f"{NAME}{name}{END}"
        return found[0]

    def lacks(self, word: str) -> bool:
        """Check whether a word consists only of unset variables."""
        found = MARKED.sub(lambda found: "" if found[1] == UNSET else found[0], word)
        if not word or found:
            return False
        self.unset |= {found[2] for found in MARKED.finditer(word)}
        return True
