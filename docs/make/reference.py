"""Make the reference of what the code itself declares: commands, keys, variables and Python.

    make goldens

A test compares, so the pages lack no command, option, key, variable or function.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import yaml

import trnslurm
from trnslurm.api.arguments import FIELD_OF, SubmitArguments
from trnslurm.cli import cli
from trnslurm.config.recipes import RECIPE_KEYS
from trnslurm.config.schema import Cluster, Recipe
from trnslurm.config.tree import fields_of
from trnslurm.contract.variables import Variable
from trnslurm.plan.keys import Key, keys_of_class
from trnslurm.plan.values import reader

DOCS = Path(__file__).resolve().parents[1]
_COMMANDS = """\
# Commands

Every command of `trnslurm`, with its options. `trnslurm COMMAND --help` prints the same text. The
[cheat sheet](cheatsheet.md) has the commands of an ordinary day on one page.

The exit code is 0 if all went well. It is 1 after an error, which is one line on standard error,
and after a run that did not complete. It is 2 if the command line is wrong, and 130 after Ctrl-C.
"""
_KEYS = """\
# Keys

Every key of a cluster profile and of a recipe, as `--set KEY=VALUE` takes it. A key without a
default is not set. `trnslurm show` prints the value of each key and where it comes from.
"""
_PROFILE = """
## Keys of a profile

A profile is `cluster-config/NAME.yaml`. It can also have the keys `description` and `remote`.
[Cluster profiles](profiles.md) explains how to write one.
"""
_RECIPE = """
## Keys of a recipe

A recipe is `jobs/NAME/recipe.yaml`. It can also have the keys `description` and `presets`, and
these keys of a profile: {}. The keys of `model` and `train` differ between recipes, and
`trnslurm recipes NAME` lists them. [Recipes](recipes.md#keys-of-recipeyaml) explains how to write
one.
"""
_VARIABLES = """\
# Environment variables

trnslurm reads and sets these variables. A test compares this page with the code.
"""
_USERS = (
    *(Variable.CLUSTER, Variable.PATH, Variable.SITE, Variable.ON, Variable.SSH),
    *(Variable.SANDBOXES, Variable.SANDBOX_SLURM),
)
_SCRIPTS = (
    *(Variable.RUN_DIR, Variable.ATTEMPT, Variable.DEVICE, Variable.HOSTS, Variable.NODE),
    *(Variable.CHECKPOINTS, Variable.RESUME, Variable.OUT, Variable.INPUT, Variable.EXPORT),
    *(Variable.FOLLOWED, Variable.FOLLOWED_STEP, Variable.OF_ROLE, Variable.SERVER),
    *(Variable.HOST, Variable.PORT, Variable.EVENT),
)
_OTHERS = tuple(each for each in Variable if each not in (*_USERS, *_SCRIPTS))
_GROUPS = {
    "You can set these on the command line's host:": _USERS,
    "A [custom script](scripts.md), a server or a notification command can read these:": _SCRIPTS,
    "The programs of a job use these among themselves. They may change with any version:": _OTHERS,
}
_API = """\
# Python API

Every public name of the package, with its signature and its docstring. `help(trnslurm.submit)`
prints the same text. [From Python](python.md) shows how to use these functions, and
[your own script](scripts.md#three-calls) what a training script calls.

`PathLike` is `str | os.PathLike[str]`, `Paths` is a `PathLike` or a sequence of them, and
`Settings` is `Mapping[str, Any] | Sequence[str]`.
"""
_PROGRAMS = """
## In a program or a notebook

These functions do what the commands of the same name do. They print nothing and ask nothing.
"""
_ARGUMENTS = """
## Arguments of a job

`plan`, `render`, `submit`, `sweep` and `each_checkpoint` take these arguments, as does each stage
of a `pipeline`. They are the [options](commands.md#trnslurm-submit) of the commands, so a value is
checked in the same way.

| argument | option | type | meaning |
|---|---|---|---|
"""
_CALLS = """
## In a training script

These functions also work without the launcher and without a run. `save`, `load` and `loader` need
PyTorch.
"""
_CLASSES = """
## Classes

The functions return objects of these classes.
"""
_JOBS = """
## For recipes and callbacks

Jobs of recipes import these from `trnslurm.train`, as do scripts with a Trainer of their own.
"""
_ERRORS = """
## Errors and warnings
"""
_IN_SCRIPTS = (
    *("report", "should_stop", "saved", "servers", "save", "load"),
    *("batches", "loader", "mix", "dataset"),
)
# What the functions return, besides the classes of the package itself.
_RETURNED = {
    "trnslurm.runs.status": ("RunStatus",),
    "trnslurm.render.bundle": ("Bundle",),
    "trnslurm.samples.batches": ("Batches", "Step", "MicroBatch"),
    "trnslurm.samples.loader": ("Loader",),
    "trnslurm.samples.mixture": ("Mix",),
    "trnslurm.datasets.open": ("Dataset",),
}
# What only trnslurm itself calls.
_OURS = ("between", "counts", "facts", "rows", "samples_at", "span", "write")
_NAMES_OF_OPTIONS = {"from_run": "--from", "settings": "--set", "arguments": "after `--`"}
_WIDE = 88


def files() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {
        "api.md": "".join(_api()),
        "commands.md": "".join(_commands()),
        "keys.md": "".join(_keys()),
        "environment.md": "".join(_variables()),
    }


def _commands() -> Iterator[str]:
    found = list(_all(cli, click.Context(cli, info_name="trnslurm")))
    yield f"{_COMMANDS}\n| command | what it does |\n|---|---|\n"
    for command, context in found:
        if not isinstance(command, click.Group):
            path = context.command_path
            yield f"| [`{path}`](#{_anchor(path)}) | {_cell(command.get_short_help_str(200))} |\n"
    yield "\n## Options of trnslurm itself\n"
    yield from _options(cli, click.Context(cli, info_name="trnslurm"))
    for command, context in found:
        if not isinstance(command, click.Group):
            usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
            yield f"\n## {context.command_path}\n\n    {usage}\n"
            yield from _help(command)
            yield from _options(command, context)


def _all(
    group: click.Group, context: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = click.Context(command, info_name=name, parent=context)
        yield command, below
        if isinstance(command, click.Group):
            yield from _all(command, below)


def _help(command: click.Command) -> Iterator[str]:
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b\n"):
            head, *lines = paragraph.removeprefix("\b\n").splitlines()
            shown = lines if head.rstrip(":") in ("Example", "Examples") else [head, *lines]
            yield "\n" + "".join(f"    {line.strip()}\n" for line in shown)
        else:
            yield f"\n{_prose(' '.join(paragraph.split()))}\n"


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    records = [
        record
        for option in command.params
        if isinstance(option, click.Option) and (record := option.get_help_record(context))
    ]
    if records:
        yield "\n| option | meaning |\n|---|---|\n"
        for names, meaning in records:
            words = ", ".join(f"`{name.strip()}`" for name in re.split(r", (?=-)", names))
            yield f"| {_cell(words)} | {_cell(_prose(' '.join(meaning.split())))} |\n"


def _keys() -> Iterator[str]:
    yield _KEYS
    also = ", ".join(f"`{key}`" for key in sorted(RECIPE_KEYS.keys() - fields_of(Recipe).keys()))
    yield from _keys_of(Cluster, "profile", _PROFILE)
    yield from _keys_of(Recipe, "recipe", _RECIPE.format(also))


def _keys_of(cls: Any, kind: str, about: str) -> Iterator[str]:
    sections: dict[str, list[Key]] = {"": []}
    for key in keys_of_class(cls, reader("", DOCS), partial(_default, cls)):
        section, dot, _ = key.key.partition(".")
        sections.setdefault(section if dot else "", []).append(key)
    for section, keys in sections.items():
        yield f"\n### {section} in a {kind}\n" if section else about
        yield "\n| key | meaning | accepts | default |\n|---|---|---|---|\n"
        for key in keys:
            default = yaml.safe_dump(key.default, default_flow_style=True)
            words = default.removesuffix("...\n").strip()
            shown = f"`{words}`" if key.default not in (None, "", (), {}) else ""
            meaning = re.sub(r"\bNone\b", "null", key.help)
            choices = [f"`{choice}`" if choice else "empty" for choice in key.choices]
            cells = (f"`{key.key}`", _prose(meaning), ", ".join(choices) or key.accepts, shown)
            yield f"| {' | '.join(map(_cell, cells))} |\n"


def _default(cls: Any, key: str) -> Any:
    """Return the default of a dotted key; None if it has none."""
    name, _, below = key.partition(".")
    if below:
        return _default(fields_of(cls)[name], below)
    field = next(each for each in dataclasses.fields(cls) if each.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _variables() -> Iterator[str]:
    yield _VARIABLES
    for about, chosen in _GROUPS.items():
        yield f"\n{about}\n"
        yield "\n| variable | meaning |\n|---|---|\n"
        for each in chosen:
            yield f"| `{each.value}` | {_cell(_prose(each.meaning))} |\n"


def _api() -> Iterator[str]:
    public = {name: getattr(trnslurm, name) for name in trnslurm.__all__}
    programs = [n for n in public if inspect.isfunction(public[n]) and n not in _IN_SCRIPTS]
    errors = [n for n in public if inspect.isclass(public[n]) and issubclass(public[n], Exception)]
    classes = [public[n] for n in public if n not in (*programs, *_IN_SCRIPTS, *errors)]
    for module, names in _RETURNED.items():
        classes += [getattr(importlib.import_module(module), name) for name in names]
    yield f"{_API}\n| name | what it does |\n|---|---|\n"
    for name in (*programs, *_IN_SCRIPTS):
        yield f"| [`{name}`](#{name}) | {_cell(_prose(_summary(public[name])))} |\n"
    for cls in classes:
        link = f"[`{cls.__name__}`](#class-{cls.__name__.lower()})"
        yield f"| {link} | {_cell(_prose(_summary(cls)))} |\n"
    yield _PROGRAMS
    for name in programs:
        yield from _function(name, name, public[name])
    yield _ARGUMENTS
    yield from _arguments_of_a_job()
    yield _CALLS
    for name in _IN_SCRIPTS:
        yield from _function(name, name, public[name])
    yield _CLASSES
    for cls in classes:
        yield from _class(cls)
    yield _JOBS
    yield from _of_jobs()
    yield _ERRORS
    for name in errors:
        above = public[name].__bases__[0].__name__
        yield f"\n### {name}\n\n    class {name}({above})\n"
        yield from _docstring(public[name])


def _function(title: str, name: str, function: Any) -> Iterator[str]:
    level = "####" if "." in title else "###"
    yield f"\n{level} {title}\n\n{_signature(name, inspect.signature(function))}"
    yield from _docstring(function)


def _signature(name: str, found: inspect.Signature) -> str:
    """Return a signature as code, on several lines if it is long."""
    parts: list[str] = []
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(str(parameter.replace(annotation=_Bare.of(parameter.annotation))))
    returned = inspect.formatannotation(_Bare.of(found.return_annotation))
    returns = "" if found.return_annotation is found.empty else f" -> {returned}"
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= _WIDE:
        return f"    {line}\n"
    lines = "".join(f"        {part},\n" for part in parts)
    return f"    {name}(\n{lines}    ){returns}\n"


class _Bare(str):
    """An annotation as its author wrote it; inspect would add quotation marks."""

    __repr__ = str.__str__

    @classmethod
    def of(cls, annotation: Any) -> Any:
        return cls(annotation) if isinstance(annotation, str) else annotation


def _arguments_of_a_job() -> Iterator[str]:
    command = cli.get_command(click.Context(cli), "submit")
    assert command is not None
    options = {each.name: each for each in command.params if isinstance(each, click.Option)}
    for name, kind in SubmitArguments.__annotations__.items():
        option = options.get(FIELD_OF.get(name, name))
        written = f"`{option.opts[-1]}`" if option else _NAMES_OF_OPTIONS[name]
        meaning = option.help or "" if option else "Arguments of a custom script."
        accepted = getattr(kind, "__forward_arg__", kind)
        cells = (f"`{name}`", written, f"`{accepted}`", _prose(meaning))
        yield f"| {' | '.join(map(_cell, cells))} |\n"


def _class(cls: type) -> Iterator[str]:
    yield f"\n### class {cls.__name__}\n"
    constructor = vars(cls).get("__init__")
    if constructor is not None and constructor.__doc__:
        shown = inspect.signature(cls).replace(return_annotation=inspect.Signature.empty)
        yield f"\n{_signature(cls.__name__, shown)}"
    yield from _docstring(cls)
    if constructor is not None and constructor.__doc__:
        yield from _docstring(constructor)
    if attributes := [*_attributes(cls)]:
        yield "\n| attribute | type | meaning |\n|---|---|---|\n"
        for name, kind, meaning in attributes:
            yield f"| `{name}` | `{_cell(kind)}` | {_cell(_prose(meaning))} |\n"
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and value.__doc__ and name[0] != "_" and name not in _OURS:
            yield from _function(f"{cls.__name__}.{name}", name, value)


def _attributes(cls: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name, type and docstring of each public field and property."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    own = next((n for n in tree.body if getattr(n, "name", "") == "__init__"), None)
    inside = own.body if isinstance(own, ast.FunctionDef) else []
    for body in (tree.body, inside):
        for node, after in pairwise([*body, ast.Pass()]):
            if isinstance(node, ast.AnnAssign):
                name, words = ast.unparse(node.target).removeprefix("self."), _text_of(after)
                if name[0] != "_" and (words or body is tree.body):
                    yield name, ast.unparse(node.annotation), words
    for name, value in vars(cls).items():
        if isinstance(value, property | cached_property) and name[0] != "_":
            get = value.fget if isinstance(value, property) else value.func
            returned = inspect.signature(get).return_annotation if get else ""
            yield name, str(returned), " ".join((get.__doc__ or "").split()) if get else ""


def _text_of(node: ast.stmt) -> str:
    """Return the docstring that a statement is, or an empty string."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _of_jobs() -> Iterator[str]:
    """Yield what the pages import, as the source has it: an import would need every library."""
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    lines = re.findall(r"^ +from (trnslurm\.train[\w.]*) import (.*)$", pages, re.MULTILINE)
    for module, name in sorted({(m, name) for m, names in lines for name in names.split(", ")}):
        source = (DOCS.parent / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        node = next(n for n in ast.parse(source).body if getattr(n, "name", "") == name)
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        if isinstance(node, ast.FunctionDef):
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            shown = f"{name}({ast.unparse(node.args)}){returns}"
        else:
            shown = f"class {name}({', '.join(map(ast.unparse, node.bases))})"
        yield f"\n### {module}.{name}\n\n    {shown}\n"
        yield from _paragraphs(ast.get_docstring(node) or "")


def _docstring(thing: Any) -> Iterator[str]:
    return _paragraphs(inspect.getdoc(thing) or "")


def _paragraphs(text: str) -> Iterator[str]:
    """Yield a docstring as Markdown, in which pages and names are links and code stays code."""
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines):
            yield f"\n{paragraph}\n"
        else:
            yield f"\n{_with_links(_prose(' '.join(paragraph.split())))}\n"


def _with_links(text: str) -> str:
    def link(found: re.Match[str]) -> str:
        page = DOCS / found[1].replace("\\", "")
        title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        return f"[{title}]({page.name})"

    return re.sub(r"\bdocs/([\w\\]+\.md)", link, text)


def _summary(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def _prose(text: str) -> str:
    """Return text in which Markdown sees options as code, and nothing else that it would change."""
    parts = text.split("`")  # every second one is code already
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(
            r"(?<![\w=-])(--?[a-z][\w-]*)|([*<>\[\]_])",
            lambda found: f"`{found[1]}`" if found[1] else f"\\{found[2]}",
            parts[place],
        )
    return "`".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _anchor(title: str) -> str:
    return title.replace(" ", "-")


if __name__ == "__main__":
    for name, text in files().items():
        (DOCS / name).write_text(text, encoding="utf-8")
