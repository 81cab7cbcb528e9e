"""The environment of a script's Python: modules, conda and virtual environments.

A trnslurm job has no login shell and none of its functions. So the job must also read the files
that define `module` and `conda`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path

from trnslurm.adopt.texts import CONDA
from trnslurm.errors import ConfigError

SETS_UP = frozenset({
    "module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack", "ulimit", "unset",
})  # fmt: skip
_CONDA = frozenset({"conda", "mamba", "micromamba"})
_HAS_PYTHON = re.compile(r"python|conda|mamba|torch|tensorflow|jax|\bml\b|/ai\b", re.IGNORECASE)
# https://modules.readthedocs.io and https://lmod.readthedocs.io: files that define the function.
_MODULES = ("/etc/profile.d/modules.sh", "/etc/profile.d/lmod.sh", "/etc/profile.d/z00_lmod.sh")


class Environment:
    """The lines of `activate`, and the Python interpreter that they provide."""

    def __init__(self, environ: Mapping[str, str], there: Callable[[str], bool]) -> None:
        self._environ, self._there = environ, there
        self.lines: list[str] = []
        self.python = ""
        self._maybe = ""
        """A module that may provide a Python interpreter."""

    def read(self, head: str, texts: Sequence[str], directory: str) -> None:
        """Handle a command. `texts` are its words, as the job's shell reads them."""
        if any(CONDA in text for text in texts):
            texts = [text.replace(CONDA, self._conda()) for text in texts]
        try:
            words = [word for text in texts for word in shlex.split(text)]
        except ValueError:
            raise ConfigError("a quotation mark is not closed") from None
        line = " ".join([head, *texts])
        if head in ("module", "ml"):
            self._need(self._modules())
            if _HAS_PYTHON.search(" ".join(words)) and words[:1] != ["purge"]:
                self._maybe = " ".join(words)
        elif head in ("source", ".") and words:
            line = self._sourced(words, texts, directory)
        elif head in _CONDA and words[:1] == ["activate"]:
            self._need(f"source {self._conda()}/etc/profile.d/conda.sh")
            self.python = self._python_of(words[1:], self._conda())
        elif head in _CONDA and words[:1] == ["deactivate"]:
            return
        elif head in _CONDA:
            raise ConfigError(f"{head} {' '.join(words[:1])} does not set up an environment")
        if line:
            self.lines.append(line)

    @property
    def doubt(self) -> str:
        """What is unknown about the Python interpreter, or an empty string."""
        if self._maybe and not self.python:
            return (
                "this may provide the Python interpreter: use --set python=/… (which python3, "
                f"after {self._maybe})"
            )
        return ""

    def _need(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)

    def _modules(self) -> str:
        """Return the line that defines the function `module`."""
        for name, below in (("LMOD_PKG", "init/bash"), ("MODULESHOME", "init/bash")):
            if (home := self._environ.get(name)) and self._there(f"{home}/{below}"):
                return f"source {home}/{below}"
        for file in _MODULES:
            if self._there(file):
                return f"source {file}"
        raise ConfigError(
            "the function `module` does not exist here: adopt the file on the cluster"
        )

    def _sourced(self, words: Sequence[str], texts: Sequence[str], directory: str) -> str:
        path = re.sub(r"^(~|\$HOME|\$\{HOME\})(?=/)", self._environ.get("HOME", "~"), words[0])
        if path == "activate" or path.endswith("conda3/bin/activate"):
            base = self._conda() if path == "activate" else path.removesuffix("/bin/activate")
            self.python = self._python_of(words[1:], base)
            return f"source {shlex.quote(base)}/bin/activate {' '.join(words[1:])}".rstrip()
        if path.endswith("etc/profile.d/conda.sh"):
            self._need(f"source {path}")
            return ""
        if not path.startswith("/"):
            here = Path(directory or ".", path).absolute()
            here = here.resolve() if ".." in here.parts else here
            if path.endswith("/bin/activate") and not self._there(str(here)):
                raise ConfigError(f"{path}: this environment does not exist here")
            if not path.endswith("/bin/activate"):
                raise ConfigError(
                    f"{path} is in the project, but the job sets up its environment before the "
                    "project is in place"
                )
            path = str(here)
            texts = [shlex.quote(path), *texts[1:]]
        if path.endswith("/bin/activate"):
            self.python = f"{self._written_out(path).removesuffix('activate')}python"
        elif not path.startswith("/etc/"):
            self._maybe = path
        return " ".join(["source", *texts])

    def _written_out(self, path: str) -> str:
        """Return a path with the values of HOME, USER and so on, which `python` does not expand."""
        value = re.compile(r"\$(?:\{(\w+)(?::-)?\}|(\w+))")
        path = value.sub(lambda found: self._environ.get(found[1] or found[2], found[0]), path)
        if "$" in path:
            raise ConfigError(f"{path}: the path of its Python interpreter is unknown here")
        return path

    def program(self, name: str) -> str:
        """Return the path of a program next to the environment's Python, or an empty string."""
        path = str(Path(self.python).with_name(name)) if self.python else ""
        return path if path and self._there(path) else ""

    def may_bring(self, what: str) -> None:
        """Note what may provide a Python interpreter that is unknown here."""
        self._maybe = what

    def extend(self, name: str, value: str) -> None:
        """Handle a line such as export PATH=/x/bin:$PATH."""
        self.lines.append(f"export {name}={value}")
        first = value.partition(":")[0].strip('"')
        if name == "PATH" and "$PATH" not in first:
            with suppress(ConfigError):
                python = self._written_out(first.replace('"', "")) + "/python"
                if self._there(python):
                    self.python = python
                elif _HAS_PYTHON.search(f"{first}/"):
                    self._maybe = f"export PATH={value}"

    def copied(self) -> Environment:
        """Return a copy, to return to later."""
        other = copy(self)
        other.lines = [*self.lines]
        return other

    def allow_failure(self) -> None:
        """Let the last line fail, because the script has `|| …` after it."""
        if self.lines and not self.lines[-1].endswith(" || true"):
            self.lines[-1] += " || true"

    def _conda(self) -> str:
        """Return the directory of conda."""
        for line in self.lines:
            if found := re.fullmatch(r"source (\S+)/etc/profile\.d/conda\.sh", line):
                return found[1]
        home, exe = self._environ.get("HOME", ""), self._environ.get("CONDA_EXE", "")
        bases = [str(Path(exe).parent.parent)] if exe else []
        bases += [f"{home}/{name}" for name in ("miniconda3", "anaconda3", "miniforge3")]
        base = next((b for b in bases if self._there(f"{b}/etc/profile.d/conda.sh")), "")
        if not base:
            raise ConfigError(
                "conda was not found here: adopt the file on a host where `conda info` works"
            )
        return base

    def _python_of(self, words: Sequence[str], conda: str) -> str:
        """Return the Python interpreter of a conda environment."""
        name = words[0] if words else "base"
        if "/" in name:
            return f"{self._written_out(name).rstrip('/')}/bin/python"
        home = self._environ.get("HOME", "/")
        places = [conda, f"{home}/.conda"]
        for base in places:
            python = f"{base}/bin/python" if name == "base" else f"{base}/envs/{name}/bin/python"
            if self._there(python):
                return python
        raise ConfigError(
            f"the environment {name!r} was not found: use --set python=/…/envs/{name}/bin/python"
        )
