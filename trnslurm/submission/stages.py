"""Plans named stages. Each stage is a run, and a stage that is already done is not run again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath

from trnslurm.config.entry import Entry
from trnslurm.config.pipeline import StageText
from trnslurm.config.schema import Cluster, Config
from trnslurm.console import Console
from trnslurm.contract.checkpoints import newest
from trnslurm.contract.inputs import CHECKPOINT, EXPORT, NAME, OUT, STEP
from trnslurm.errors import ConfigError, RunError, TrnslurmError
from trnslurm.frozen import Frozen
from trnslurm.plan.inputs import inputs_of, static_places, taken_in
from trnslurm.plan.memory import check_memory
from trnslurm.plan.spec import make_spec
from trnslurm.records.foreign import is_ours
from trnslurm.records.run import STAGE, Record, RunDir
from trnslurm.render.project import PROJECT_CODE
from trnslurm.render.uses import used_by
from trnslurm.runs.result import other_sizes
from trnslurm.runs.status import is_complete
from trnslurm.schedulers.interface import WaitsFor
from trnslurm.submission.choice import choose_to_submit, config_of
from trnslurm.submission.job import Job, make_job
from trnslurm.submission.options import JobOptions
from trnslurm.submission.submission import PlannedRun

_MOST_LOOKED_AT = 50
_MOST_TOLD = 3
# Keys of a recipe that change nothing of its result.
_NO_RESULT = (
    *("project", "inputs", "follows", "precompile", "standby", "hang_minutes", "keep_last"),
    *("profile", "default_cluster", "default_preset", "devices", "zero1", "optimizer_bytes"),
    *("graphs", "reference", "begins_with"),
)


class Stage(Frozen):
    """One of several runs, and the stages that come before it."""

    name: str
    options: JobOptions
    needs: tuple[str, ...] = ()
    continues: str = ""
    """The stage whose newest checkpoint it starts from."""
    condition: str = ""
    files: tuple[str, ...] | None = None
    """Patterns of the project's files that affect the result.

    If empty, the script's imports decide. None runs the stage regardless of what was done before.
    """

    place: str = ""
    """The file that declares the stage, or another name for it in an error."""


def stage_of(text: StageText, options: JobOptions, place: str) -> Stage:
    """Return one stage of a pipeline."""
    continues = re.fullmatch(rf"\{{({NAME})\.{CHECKPOINT}\}}", options.from_run or "")
    return Stage(
        name=text.name,
        options=options,
        needs=text.needs,
        continues=continues[1] if continues else "",
        condition=text.condition,
        files=text.files,
        place=place,
    )


class Planned(Frozen):
    """The plan for each stage."""

    runs: Sequence[PlannedRun]
    cluster: Cluster
    stamp: str
    stages: Mapping[str, str]
    """Stage -> its run, or an earlier run if the stage is already done."""
    why: Mapping[str, str]
    """Stage -> why it runs although it was done before."""


def plan_stages(
    stages: Sequence[Stage],
    names: Mapping[str, str],
    console: Console,
    *,
    again: Sequence[str] = (),
) -> Planned:
    """Plan the run of each stage that is not done. `names` are the names of the runs.

    Stages in `again` run again, whether they are done or not.
    """
    return _Planner(stages, names, console, again).plan()


class _Planner:
    """Plans stages one after another."""

    def __init__(
        self,
        stages: Sequence[Stage],
        names: Mapping[str, str],
        console: Console,
        again: Sequence[str],
    ) -> None:
        self._stages, self._names, self._console = stages, names, console
        self._again = again
        self._root, self._stamp = Path(), ""
        self._runs: list[PlannedRun] = []
        self._places: dict[str, RunDir] = {}
        """Stage -> its run. The run of a planned stage does not exist yet."""
        self._done: dict[str, RunDir] = {}
        self._why: dict[str, str] = {}
        self._made_of: dict[str, Mapping[str, str]] = {}
        self._configs: dict[str, Config] = {}

    def plan(self) -> Planned:
        cluster = None
        for stage in self._stages:
            try:
                own = self._filled(stage)
                own = choose_to_submit(replace(own, cluster=cluster or own.cluster), self._console)
                cluster = own.cluster
                self._plan(stage, own)
            except TrnslurmError as error:
                if not stage.place:
                    raise
                raise ConfigError(f"{stage.place}: stages.{stage.name}: {error}") from None
        return Planned(
            runs=self._runs,
            cluster=next(iter(self._configs.values())).cluster,
            stamp=self._stamp,
            stages={name: run.name for name, run in self._places.items()},
            why=self._why,
        )

    def _filled(self, stage: Stage) -> JobOptions:
        """Return the options of a stage, with the directories of the stages before it."""
        inputs = {name: str(self._places[name].path) for name in stage.needs}
        places = static_places(inputs)
        settings = []
        for word in stage.options.settings:
            for name, place in taken_in(word, inputs):
                if f"{name}.{place}" not in places:
                    raise ConfigError(
                        f"--set {word}: {{{name}.{place}}} is known only when the stage starts: "
                        "pass it in a script's arguments instead"
                    )
                word = word.replace(f"{{{name}.{place}}}", places[f"{name}.{place}"])
            settings.append(word)
        own = replace(stage.options, settings=settings)
        if stage.files is not None:
            own = replace(own, inputs=inputs, starts_if=stage.condition)
        if stage.continues:
            before = self._places[stage.continues]
            own = replace(own, from_run=None, previous=str(before.checkpoints))
        return own

    def _plan(self, stage: Stage, options: JobOptions) -> None:
        name, host = self._names[stage.name], options.host
        options = replace(options, name=name)
        config = config_of(options, self._console)
        if stage.continues:
            _refuse_unfit(self._configs[stage.continues], config)
        self._configs[stage.name] = config
        first = next(iter(self._configs.values()))
        for key in ("run_root", "compile_cache", "scheduler"):
            if getattr(config.cluster, key) != getattr(first.cluster, key):
                raise ConfigError(f"{key}: all stages must have the same value")
        if not self._places:
            every = [*self._names.values()]
            self._root, self._stamp = host.settle(config.cluster.run_root, every)
        spec = make_spec(config, options.nodes, name=name)
        job = make_job(spec, options.workspace.template_dirs())
        for one in inputs_of(config.recipe):
            if EXPORT in one.wants:
                _refuse_unexported(one.name, self._configs[one.name])
        if stage.files is not None:
            self._made_of[stage.name] = self._ingredients(stage, config, job)
            if done := self._find_done(stage, name):
                self._places[stage.name] = self._done[stage.name] = done
                return
        if warning := check_memory(spec):
            self._console.warn(f"{config.title}: {warning}")
        awaited = [n for n in (*stage.needs, stage.continues) if n and n not in self._done]
        if not job.has_queue and self._runs:  # on this machine one runs after another
            awaited = [next(reversed([n for n in self._places if n not in self._done]))]
        runs = dict.fromkeys(self._places[n].name for n in awaited)
        self._places[stage.name] = RunDir(self._root / f"{self._stamp}-{name}")
        self._runs.append(
            PlannedRun(
                job=job,
                waits_for=WaitsFor(success=tuple(runs)),
                values={"stage": stage.name} if stage.files is not None else {},
                made_of=self._made_of.get(stage.name, {}),
            )
        )

    def _ingredients(self, stage: Stage, config: Config, job: Job) -> dict[str, str]:
        """Return everything that affects a stage's result: readable names, each with a hash."""
        recipe = {k: v for k, v in asdict(config.recipe).items() if k not in _NO_RESULT}
        recipe["cluster"] = config.cluster_name
        if config.recipe.project:
            recipe |= {"nodes": job.nodes, "workers_per_node": job.workers_per_node}
        text = json.dumps(recipe, sort_keys=True, default=str)
        for name in stage.needs:
            text = text.replace(str(self._places[name].path), f"{{{name}}}")
        found = {"its settings": _hash(text)}
        for name in stage.needs:
            found[f"{STAGE}{name}"] = _hash(json.dumps(self._made_of[name], sort_keys=True))
        sha256 = job.bundle.sha256()
        prefix = PROJECT_CODE if config.recipe.project else f"code/jobs/{job.recipe}/"
        files = {n.removeprefix(prefix): h for n, h in sha256.items() if n.startswith(prefix)}
        return found | {
            n: h for n, h in files.items() if n in self._used(stage, config, job, files)
        }

    def _used(self, stage: Stage, config: Config, job: Job, files: Mapping[str, str]) -> set[str]:
        """Return the files of a stage's project that affect its result."""
        if not config.recipe.project:
            return {*files}
        if stage.files:
            used = {n for n in files if any(PurePosixPath(n).match(p) for p in stage.files)}
            if not used:
                raise ConfigError(
                    f"files: no file in {config.recipe.project} matches {', '.join(stage.files)}"
                )
            return used
        texts = {n: job.bundle.files[f"{PROJECT_CODE}{n}"] for n in files}
        return used_by(texts, Entry(config.recipe.entry).name, self._beside(config))

    def _beside(self, config: Config) -> set[str]:
        """Return the files of a project that other stages start."""
        here, root = Path.cwd(), Path(config.recipe.project)
        started = {here / stage.options.recipe for stage in self._stages}
        started |= {here / stage.place for stage in self._stages}
        return {str(file.relative_to(root)) for file in started if file.is_relative_to(root)}

    def _find_done(self, stage: Stage, name: str) -> RunDir | None:
        """Return an earlier run with the same result, or record why there is none.

        A stage is not done if a stage that it needs is not done.
        """
        made_of = self._made_of[stage.name]
        before: Record | None = None
        for run, record in _earlier(self._root, name):
            before = before or record
            if not self._done.keys() >= {*stage.needs}:
                break
            if record.made_of == made_of and stage.name not in self._again:
                if not (lacks := self._lacks(stage, run)):
                    return run
                self._why[stage.name] = f"{run.name} {lacks}"
                return None
        if before:
            runs = [f"stage {name} runs again" for name in stage.needs if name not in self._done]
            why = _changed(before.made_of, made_of) or ", ".join(runs) or "--again"
            self._why[stage.name] = why
        return None

    def _lacks(self, stage: Stage, run: RunDir) -> str:
        """Return what a run no longer has although later stages use it."""
        words = [word for other in self._stages for word in other.options.arguments]
        taken = {p for word in words for _, p in taken_in(word, {stage.name: ""})}
        if OUT in taken and not run.out.is_dir():
            return f"no longer has {OUT}"
        if taken & {CHECKPOINT, STEP, EXPORT} and not newest(run, takes=True):
            return "no longer has a checkpoint"
        return ""


def _earlier(root: Path, name: str) -> Iterator[tuple[RunDir, Record]]:
    """Yield the completed runs of a stage, newest first."""
    found = sorted(root.glob(f"*-{name}"), reverse=True)
    for run in map(RunDir, found[:_MOST_LOOKED_AT]):
        with contextlib.suppress(RunError, OSError):
            record = run.record()
            if record.made_of and is_ours(run.path) and is_complete(run, record):
                yield run, record


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return, in words, which ingredients differ."""
    words = [f"{name} was removed" for name in before if name not in now]
    words += [
        f"{name} {'changed' if name in before else 'is new'}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    more = f" and {len(words) - _MOST_TOLD} more" if len(words) > _MOST_TOLD else ""
    return f"{', '.join(words[:_MOST_TOLD])}{more}".replace("settings changed", "settings differ")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_unexported(name: str, config: Config) -> None:
    if config.recipe.project or not (config.code_dir / "export.py").is_file():
        raise ConfigError(
            f"{{{name}.{EXPORT}}}: {config.title} has no export.py: use {{{name}.{CHECKPOINT}}}"
        )


def _refuse_unfit(before: Config, config: Config) -> None:
    if before.recipe.project or config.recipe.project:
        raise ConfigError(
            f"--from: {config.title} cannot continue {before.title}: only trnslurm's recipes can: "
            "pass {NAME.checkpoint} in a script's arguments instead"
        )
    if wrong := other_sizes(before.recipe.model, config.recipe.model):
        raise ConfigError(f"{config.title} cannot continue {before.title}: {wrong[0]}")
    train = before.recipe.train
    if train.get("save_every") == 0 and not train.get("save_minutes"):
        raise ConfigError(
            f"{before.title}: train.save_every is 0, so {config.preset or config.recipe_name} "
            "would not find a checkpoint"
        )
