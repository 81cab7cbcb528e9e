"""Reads plan.json, and the sections of it that a job declares."""

import argparse
import json
import sys
from dataclasses import is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import trnslurm
from trnslurm.contract.plan import FORMAT, to_fields
from trnslurm.contract.plan import JobPlan as JobPlan
from trnslurm.declared import Declaration, find_problem, read_declaration
from trnslurm.train.environment import Environment
from trnslurm.train.errors import TrainError

PRECISIONS = ("fp32", "mixed", "bf16")

Section = TypeVar("Section")


def parse_plan(description: str) -> JobPlan:
    """Read the plan that a job's only argument names."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("plan", type=Path, help="plan.json of the run")
    return load_plan(parser.parse_args().plan)


def load_plan(path: Path) -> JobPlan:
    """Read plan.json."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise TrainError(f"{path}: not JSON ({error})") from None
    if isinstance(values, dict) and values.get("format") != FORMAT:
        raise TrainError(f"{path}: format {values.get('format')}, but this code reads {FORMAT}")
    told = to_fields(values) if isinstance(values, dict) else values
    plan = read_section(JobPlan, told, where=str(path))
    if plan.precision not in PRECISIONS:
        raise TrainError(
            f"{path}: precision {plan.precision!r} is not one of {', '.join(PRECISIONS)}"
        )
    return plan


def read_settings(cls: type[Section], plan: JobPlan) -> Section:
    """Make a job's own dataclass from the plan's section train."""
    settings = read_section(cls, plan.train, where="plan.json: train")
    check_section(cls, "train", plan)
    return settings


def check_section(cls: type, name: str, plan: JobPlan) -> None:
    """Refuse a plan whose section (train, model) has values that its class does not accept."""
    around = vars(plan) | {"data.path": plan.data}
    declared = declaration_of(cls)
    if declared and (problem := find_problem(declared, name, around[name], around)):
        raise TrainError(problem.text)


def declaration_of(cls: type) -> Declaration | None:
    """Return what a class of this job declares, as the launcher reads it."""
    return read_declaration(_read_source, str(sys.modules[cls.__module__].__file__), cls.__name__)


def _read_source(path: str) -> bytes | None:
    """Read a file of the running code, by its absolute path or as trnslurm/train/plan.py."""
    file = Path(trnslurm.__file__).parents[1] / path
    if file.is_file():
        return file.read_bytes()
    ours = Path(trnslurm.__file__).parent
    if not file.is_relative_to(ours):
        return None
    resource = files(trnslurm).joinpath(*file.relative_to(ours).parts)  # in a bundle, in its zip
    return resource.read_bytes() if resource.is_file() else None


def read_section(cls: type[Section], values: Any, *, where: str) -> Section:
    """Make a dataclass from JSON; an unknown, missing or mistyped key is an error."""
    if not isinstance(values, dict):
        raise TrainError(f"{where}: expected keys and values")
    kinds = get_type_hints(cls)
    for key in values.keys() - kinds.keys():
        raise TrainError(f"{where}: unknown key {key}")
    # A key with a default may be missing: plans from before it stay valid.
    given = {key: kind for key, kind in kinds.items() if key in values or not hasattr(cls, key)}
    return cls(**{key: _read_value(kind, key, values, where) for key, kind in given.items()})


def _read_value(kind: Any, key: str, values: dict[str, Any], where: str) -> Any:
    if key not in values:
        raise TrainError(f"{where}: key {key} is missing")
    value, inside = values[key], f"{where}: {key}"
    if isinstance(kind, type) and is_dataclass(kind):
        return read_section(kind, value, where=inside)
    # The choices of a Literal are checked with the other declared rules.
    parts = get_args(kind)
    plain = type(parts[0]) if get_origin(kind) is Literal else get_origin(kind) or kind
    if plain is float and type(value) is int:
        return float(value)
    if type(value) is not plain:
        raise TrainError(f"{inside} is {value!r}, expected {plain.__name__}")
    inner: Any = parts[-1] if parts else None
    is_section = is_dataclass(inner)
    if is_section and plain is dict:
        return {n: read_section(inner, each, where=f"{inside}: {n}") for n, each in value.items()}
    if is_section and plain is list:
        return [read_section(inner, each, where=inside) for each in value]
    return value


def describe_plan(plan: JobPlan, environment: Environment) -> str:
    """Describe what will run, and where, in a few lines."""
    batch = plan.batch
    groups = "" if batch.groups == plan.workers else f", {batch.groups} groups"
    return f"""\
{plan.recipe} ({plan.preset}): {environment.phase}, attempt {environment.attempt}
  device  {plan.device}, W {plan.workers} ({plan.nodes} nodes x \
{plan.workers_per_node} workers{groups})
  batch   G {batch.global_batch}, m {batch.micro_batch}, A {batch.accumulation}, \
{batch.units} micro-batches and {batch.padding_units} of padding"""
