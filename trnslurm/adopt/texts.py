"""The words of a batch script as texts: with places, and with marks for what is not known here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from trnslurm.adopt.shell import Word
from trnslurm.adopt.variables import Variables

# A variable of the user's shell, and what only the script's own shell knows, within a text.
NAME, UNKNOWN, END = "\ue000", "\ue001", "\ue002"
MARKED = re.compile(f"({NAME}|{UNKNOWN})(.*?){END}", re.DOTALL)
# What variables of the job are in a script's arguments.
PLACES = {
    "SLURM_NNODES": "{nodes}", "SLURM_JOB_NUM_NODES": "{nodes}", "SLURM_NTASKS": "{workers}",
    "SLURM_NPROCS": "{workers}", "SLURM_NTASKS_PER_NODE": "{workers_per_node}",
    "SLURM_GPUS_ON_NODE": "{workers_per_node}", "SLURM_GPUS_PER_NODE": "{workers_per_node}",
    "SLURM_JOBNAME": "{name}", "SLURM_NODEID": "{node}", "MASTER_ADDR": "{master_addr}",
    "MASTER_PORT": "{master_port}", "SLURM_ARRAY_TASK_ID": "{task}", "SLURM_JOB_ID": "{run_id}",
    "SLURM_JOBID": "{run_id}", "SLURM_ARRAY_JOB_ID": "{run_id}",
}  # fmt: skip
# What a job has in its closed environment.
IN_JOB = frozenset({"HOME", "USER", "PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH"})


class UnclearError(Exception):
    """What in a statement is not understood."""


def shell_word(text: str) -> str:
    """Return a text as a word for the shell, which expands the marked names."""
    words, at = "", 0
    for found in MARKED.finditer(text):
        words += shlex.quote(text[at : found.start()]) if found.start() > at else ""
        words += f'"${{{found[2]}}}"' if found[1] == NAME else shlex.quote(found[2])
        at = found.end()
    return words + (shlex.quote(text[at:]) if at < len(text) or not text else "")


def with_values(text: str, environ: Mapping[str, str]) -> str:
    """Return a text with the values that the marked names have in the user's shell."""
    return MARKED.sub(lambda found: environ.get(found[2], ""), text)


def as_script(word: Word) -> str:
    """Return a word as the text of a script: its variables are those of that script."""
    return "".join(f"${{{p.text}}}" if p.kind == "name" else p.text for p in word.parts)


def plain(text: str) -> str:
    """Return a text without its marks."""
    return MARKED.sub(r"\2", text)


class Texts:
    """Words as texts, with the values that are known of the script's variables."""

    def __init__(
        self, variables: Variables, numbers: Mapping[str, int], environ: Mapping[str, str]
    ) -> None:
        self._variables, self._numbers, self._environ = variables, numbers, environ

    def text(self, word: Word) -> str:
        """Return a word as an argument: with places, and with marks for what is not known here."""
        return self.joined(self._variables.expand(word))

    def texts(self, words: Sequence[Word]) -> list[str]:
        """Return words as arguments; one may be several."""
        return [self.joined(each) for word in words for each in self._variables.words(word)]

    def joined(self, word: Word) -> str:
        """Return a word whose variables have been replaced."""
        text = ""
        for part in word.parts:
            if part.kind == "text":
                text += re.sub(r"\{([A-Za-z_]\w*)\}", r"{{\1}}", part.text)
            elif part.kind == "name" and part.text in PLACES:
                text += PLACES[part.text]
            elif part.kind == "other" or part.text in self._variables.computed:
                text += f"{UNKNOWN}{part.text}{END}"
            elif part.text in self._numbers:
                text += str(self._numbers[part.text])
            elif part.text in ("PWD", "SLURM_SUBMIT_DIR"):
                text += "."
            elif part.text in self._environ and not part.text.startswith("SLURM_"):
                text += f"{NAME}{part.text}{END}"
            else:
                text += f"{UNKNOWN}${part.text}{END}"
        return text

    def shell(self, word: Word) -> str:
        """Return a word for a line of `activate`, in which only few variables are known."""
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
            elif part.kind == "other" and re.fullmatch(r"\$\(\S*conda .*hook.*\)", part.text):
                text += f'"{part.text}"'
            else:
                raise UnclearError(f"{part.text} is not known in the job's environment")
        return text

    def counted(self, word: str) -> str:
        """Return a word with the job's numbers in place of their places."""
        for name, number in self._numbers.items():
            word = word.replace(PLACES.get(name, name), str(number))
        return word
