"""Renders templates with Jinja: strict, sandboxed, with every value quoted for the shell.

Jinja is imported late, because most commands do not render anything.
"""

from __future__ import annotations

import marshal
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trnslurm.config.search import packaged_root
from trnslurm.errors import RenderError, did_you_mean
from trnslurm.render.cached import cached

if TYPE_CHECKING:
    import jinja2


# As a user's template names them. A block of trnslurm's can contain a block of the template's own.
_EXTENDS = r"(?s)\A\s*(?:{#.*?#}\s*)?{%-?\s*extends\s+[\"']trnslurm/([^\"']+)"
_BLOCK = r"(?m)^{%[-+]?\s*block\s+(\w+)"


# Templates that this process has compiled, by everything that they depend on.
_compiled: dict[tuple[str, ...], Any] = {}


class _Raw(str):
    """Text that goes into a script unquoted."""


def open_templates(template_dirs: Sequence[Path]) -> jinja2.Environment:
    """Return a Jinja environment for templates; the first directory with a name wins.

    The packaged templates are always available under trnslurm/, so that a template with the same
    name can extend them.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        """Jinja's environment, which caches compiled templates."""

        def compile(self, source: Any, name: Any = None, filename: Any = None, *_: Any) -> Any:
            made_of = (jinja2.__version__, str(source), str(name), str(filename))
            if made_of not in _compiled:
                afresh = super().compile
                code = cached(
                    __file__, made_of, lambda: marshal.dumps(afresh(source, name, filename))
                )
                _compiled[made_of] = marshal.loads(code)
            return _compiled[made_of]

    class ScriptContext(jinja2.runtime.Context):
        """Jinja's context, in which the text from super() is part of the script."""

        def super(self, name: str, current: Any) -> Any:
            above = super().super(name, current)
            return above if isinstance(above, jinja2.Undefined) else lambda: _Raw(above())

    Environment.context_class = ScriptContext
    packaged = jinja2.FileSystemLoader(packaged_root() / "templates")
    environment = Environment(
        loader=jinja2.ChoiceLoader(
            [
                jinja2.PrefixLoader({"trnslurm": packaged}),
                jinja2.FileSystemLoader([str(d) for d in template_dirs]),
            ]
        ),
        undefined=jinja2.StrictUndefined,
        finalize=_quoted,  # quotes every expression, even without a filter
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for directory in template_dirs:
        if directory != packaged_root() / "templates":
            _refuse_unknown_blocks(directory)
    environment.filters |= {
        "comment": _comment,
        "directive": _directive,
        "column": lambda value: _Raw(_directive(value).ljust(35)),
        "shell": _Raw,
    }
    return environment


def _refuse_unknown_blocks(directory: Path) -> None:
    """Reject a template with a block that trnslurm's lacks; Jinja would ignore the block."""
    for file in sorted(directory.rglob("*.j2")):
        text = file.read_text(encoding="utf-8", errors="replace")
        extended = re.search(_EXTENDS, text)
        above = packaged_root() / "templates" / (extended[1] if extended else "")
        if not extended or not above.is_file():  # Jinja reports this if the template is used
            continue
        known = re.findall(_BLOCK, above.read_text(encoding="utf-8"))
        for name in re.findall(_BLOCK, text):
            if name not in known:
                hint = did_you_mean(name, known) or f"; its blocks: {', '.join(known)}"
                raise RenderError(f"{file}: trnslurm/{extended[1]} has no block {name}{hint}")


def _quoted(value: Any) -> Any:
    import jinja2

    if isinstance(value, _Raw | jinja2.Undefined):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RenderError(f"a template prints {value!r}, which is neither a string nor a number")
    return shlex.quote(value) if isinstance(value, str) else str(value)


def _comment(value: Any) -> _Raw:
    """Return text for a comment line; reject text that would end the comment."""
    text = str(value)
    if any(not c.isprintable() for c in text):
        raise RenderError(f"{text!r} is not allowed in a comment")
    return _Raw(text)


def _directive(value: Any) -> _Raw:
    """Return a word for an #SBATCH line, quoted for sbatch."""
    text = str(value)
    if any(not c.isprintable() for c in text):
        raise RenderError(f"{text!r} is not allowed in an #SBATCH line")
    name, equals, argument = text.partition("=")
    if not equals or re.fullmatch(r"[A-Za-z0-9_./:,%@+=*\[\]&|!-]*", argument):
        return _Raw(text)
    if '"' in argument:
        raise RenderError(f"{text}: a double quote is not allowed in an #SBATCH line")
    escaped = argument.replace("\\", "\\\\")
    return _Raw(f'{name}="{escaped}"')


def fill(environment: jinja2.Environment, name: str, values: Mapping[str, Any]) -> str:
    """Return a template filled in with values."""
    import jinja2

    try:
        return environment.get_template(name).render(values)
    except jinja2.TemplateNotFound as error:
        raise RenderError(f"template {error.name} was not found on the search path") from None
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"{error.filename}:{error.lineno}: {error.message}") from None
    except RenderError:
        raise
    except Exception as error:  # a template is a program: anything can fail
        words = str(error) or type(error).__name__
        raise RenderError(f"{_template_line(environment, name, error)}: {words}") from None


def _template_line(environment: jinja2.Environment, name: str, error: BaseException) -> str:
    found = str(environment.get_template(name).filename or name)
    frame = error.__traceback__
    while frame is not None:  # Jinja rewrites the traceback to the templates' own lines
        if "__jinja_exception__" in frame.tb_frame.f_globals:
            found = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found
