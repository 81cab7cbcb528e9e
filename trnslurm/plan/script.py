"""Warns if the source of a custom script shows that it needs a GPU that its nodes do not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trnslurm.contract.files import read_file
from trnslurm.plan.spec import JobSpec

# Signs of GPUs of this machine: NVIDIA's, AMD's, and Windows' below WSL.
_GPUS_HERE = ("/proc/driver/nvidia", "/dev/kfd", "/dev/dxg")
_LONGEST = 1 << 20
_ASKS = re.compile(rb"is_available|device_count|nvidia-smi")
_MAIN = "__name__ == '__main__'"
# Decorators after which the function's body runs when it is called.
_RUNS = re.compile(r"(\w+\.)*(record|main|command|option|argument|no_grad)\b")
_NOT_ALWAYS = (
    *(ast.BoolOp, ast.IfExp, ast.Lambda),
    *(ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp),
)
_MAY_END = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_ENDS = re.compile(r"(sys\.|os\._?)?exit|quit|os\.exec\w+")


def check_script(spec: JobSpec) -> str:
    """Return a warning if the script is certain to fail without the GPU that its nodes lack."""
    recipe, here = spec.config.recipe, spec.scheduler.is_here
    if not recipe.project or not recipe.entry.endswith(".py") or spec.instance.gpus:
        return ""
    if here and any(Path(sign).exists() for sign in _GPUS_HERE):
        return ""
    try:
        source = read_file(Path(recipe.project) / recipe.entry, _LONGEST)
        tree = ast.parse(source)
        if _ASKS.search(source):  # it may take another way
            return ""
        functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
        needs = next(filter(_needs_gpu, _calls(tree.body, functions, ())), None)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ""
    if needs is None:
        return ""
    has = "this machine has" if here else f"the nodes ({spec.instance.name}) have"
    what = ast.unparse(needs.func)
    return f"{recipe.entry}, line {needs.lineno}: {what} needs a GPU, but {has} none"


def _needs_gpu(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    values = [*call.args, *(word.value for word in call.keywords)]
    if name.endswith("init_process_group"):
        return any(isinstance(v, ast.Constant) and v.value == "nccl" for v in values)
    # A negative device selects none.
    negative = any(isinstance(value, ast.UnaryOp) for value in values)
    return name == "torch.cuda.set_device" and not negative


def _calls(
    body: Sequence[ast.stmt], functions: Mapping[str, ast.FunctionDef], within: tuple[str, ...]
) -> Iterator[ast.Call]:
    """Yield the calls that this file always makes, regardless of values, until it may end."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == _MAIN:
            yield from _calls(statement.body, functions, within)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
            for call in _calls_in(statement):
                yield call
                called = functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
                runs = called and all(_RUNS.match(ast.unparse(d)) for d in called.decorator_list)
                if called and runs and called.name not in within:
                    yield from _calls(called.body, functions, (*within, called.name))
        elif not isinstance(statement, ast.FunctionDef | ast.ClassDef) and _may_end(statement):
            return


def _calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that an expression always makes, innermost first."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _NOT_ALWAYS):
            yield from _calls_in(child)
    if isinstance(node, ast.Call):
        yield node


def _may_end(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, _MAY_END)
        or (isinstance(node, ast.Call) and _ENDS.fullmatch(ast.unparse(node.func)))
        for node in ast.walk(statement)
    )
