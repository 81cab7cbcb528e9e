"""Asks nodes what Slurm does not report about them, with a short job on one node of each kind.

The job is a shell script that reads files on the node. It leaves no files behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO

from trnslurm.config.catalog import InstanceType, ec2_name
from trnslurm.errors import SlurmError
from trnslurm.slurm.commands import Slurm, own_words, without_overrides
from trnslurm.slurm.detect import DetectedCluster, Nodes, Told

ROOT = "/"
_PR_SET_PDEATHSIG = 1
_TIME_MIN = 2
_POLL_S = 0.2
_END_S = 10.0
_MOST_BYTES = 1 << 20
_WORD = "trnslurm-node"
# On EC2's Nitro, product_name is the instance type. SageMaker HyperPod has /opt/sagemaker_cluster
# on every node, for which AWS's own job scripts look (awsome-distributed-training). nvidia-smi
# would need the devices, which the job does not ask for; the driver's files do not.
_LOOK = rf"""
PATH=/usr/bin:/bin:$PATH
say() {{ printf '{_WORD} %s %s\n' "$1" "$2"; }}
say host "$(uname -n)"
for each in vendor=sys_vendor product=product_name; do
  say "${{each%=*}}" "$(head -n 1 "$1/sys/class/dmi/id/${{each#*=}}" 2> /dev/null)"
done
for each in "$1"/sys/class/infiniband/*; do
  case $(readlink "$each/device/driver") in */efa) say efa "${{each##*/}}" ;; esac
done
for each in "$1"/sys/class/net/*; do [ ! -d "$each" ] || say interface "${{each##*/}}"; done
for each in "$1"/dev/neuron[0-9]*; do [ ! -e "$each" ] || say neuron "${{each##*/}}"; done
for each in "$1"/proc/driver/nvidia/gpus/*/information; do
  [ ! -r "$each" ] || say gpu "$(sed -n 's/^Model:[[:space:]]*//p' "$each")"
done
[ ! -d "$1/opt/sagemaker_cluster" ] || say hyperpod yes
say slurm "$(PATH=$PATH:$2 scontrol --version 2> /dev/null)"
say whole yes
"""


def ask_one_of_each(
    slurm: Slurm,
    site: DetectedCluster,
    partition: str | None,
    types: Mapping[str, InstanceType],
    *,
    timeout_s: float,
    say: Callable[[str], None],
) -> DetectedCluster:
    """Return the cluster with what one node of each kind has reported; fail if none answers."""
    among = [n for n in site.partitions if partition in (None, n.name, n.label)]
    asked: dict[str, Nodes] = {}
    for kind in sorted(among, key=lambda n: not n.default):
        if kind.up and not kind.unusable:
            asked.setdefault(kind.node, kind)
    if not asked:
        raise SlurmError("--ask-nodes: none of these nodes is up and accepting your jobs")
    told: dict[str, Told] = {}
    silent: list[str] = []
    say(f"Asking one node of each kind: {', '.join(kind.label for kind in asked.values())}")
    jobs = [_Job(slurm, kind) for kind in asked.values()]
    deadline = time.monotonic() + timeout_s
    try:
        for job in jobs:
            job.start()
        left = jobs
        while left:
            late = time.monotonic() > deadline
            for job in [job for job in left if job.ended(say) or late]:
                try:
                    answer = told[job.kind.node] = job.answer(timeout_s)
                    say(f"{job.kind.label}: {_shown(answer)}")
                except SlurmError as error:
                    silent.append(f"{job.kind.label}: {error}")
                left = [other for other in left if other is not job]
            time.sleep(_POLL_S)
    finally:
        for job in jobs:
            job.end()
    if silent and not told:
        raise SlurmError("; ".join(silent))
    for words in silent:
        say(f"warning: {words}")
    return replace(
        site,
        partitions=tuple(
            _informed(kind, told[kind.node], types) if kind.node in told else kind
            for kind in site.partitions
        ),
    )


class _Job:
    """The job on a node of one kind."""

    def __init__(self, slurm: Slurm, kind: Nodes) -> None:
        self.kind = kind
        self._slurm = slurm
        self._srun: subprocess.Popen[bytes] | None = None
        self._seen = ""
        # Files, because nobody reads a pipe while waiting for another job.
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115

    def start(self) -> None:
        kind, libc = self.kind, ctypes.CDLL(None)
        named = {"partition": kind.name, "account": kind.account, "qos": kind.qos}
        named["constraint"] = kind.constraint
        if kind.label != kind.name and not kind.constraint:
            named["nodelist"] = kind.node
        self._srun = subprocess.Popen(
            [
                self._slurm.path("srun"),
                *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", f"--time={_TIME_MIN}"),
                *("--job-name=trnslurm-detect", "--export=NONE", "--chdir=/", "--input=none"),
                *(f"--{key}={value}" for key, value in named.items() if value is not None),
                *("/bin/sh", "-c", _LOOK, "sh", ROOT.rstrip("/"), self._slurm.bin_dir or ""),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env=without_overrides(os.environ),
            process_group=0,  # so that only we end it on Ctrl-C
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    def ended(self, say: Callable[[str], None]) -> bool:
        """Check whether the job has ended; print srun's new output."""
        assert self._srun
        code = self._srun.poll()
        said = self._said()
        if "\n" in said[len(self._seen) :]:
            lines, _, _ = said[len(self._seen) :].rpartition("\n")
            self._seen += f"{lines}\n"
            if code in (None, 0):
                say(f"{self.kind.label}: {own_words('srun', lines).removeprefix('srun: ')}")
        return code is not None

    def answer(self, timeout_s: float) -> Told:
        """Return what the node has reported; raise a SlurmError if it has reported nothing."""
        assert self._srun
        if self._srun.poll() is None:
            raise SlurmError(
                f"no node started the job within {timeout_s:g} s, so it was cancelled: a node may "
                "still be booting; try again, or pass --timeout"
            )
        if self._srun.returncode:
            why = own_words("srun", self._said()) or f"srun: exit code {self._srun.returncode}"
            raise SlurmError(f"no answer from a node: {why}")
        if found := _read(_content(self._out)):
            return found
        raise SlurmError("the node returned no output")

    def end(self) -> None:
        """Cancel the job if it has not ended, and close its files."""
        if self._srun and self._srun.poll() is None:
            self._srun.terminate()  # srun cancels the job, or takes it off the queue
            try:
                self._srun.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._srun.kill()
                self._srun.wait()
        self._out.close()
        self._err.close()

    def _said(self) -> str:
        return _content(self._err)


def _read(output: str) -> Told | None:
    """Return what a node has printed, ignoring other output, such as a prolog's."""
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        key, _, value = rest.partition(" ")
        if word == _WORD:
            found.setdefault(key, []).append(" ".join(value.split()))
    if "whole" not in found:
        return None
    one = {key: values[0] for key, values in found.items()}
    return Told(
        host=one["host"],
        instance_type=ec2_name(one["product"]) if one["vendor"] == "Amazon EC2" else None,
        efa=len(found.get("efa", ())),
        gpus=len(found.get("gpu", ())),
        gpu=one.get("gpu", ""),
        neuron_devices=len(found.get("neuron", ())),
        interfaces=tuple(found.get("interface", ())),
        hyperpod="hyperpod" in found,
        slurm=one["slurm"].removeprefix("slurm "),
    )


def _informed(kind: Nodes, told: Told, types: Mapping[str, InstanceType]) -> Nodes:
    """Return nodes with what one of them has reported."""
    known = types.get(told.instance_type or "")
    doubt = ""
    if told.neuron_devices and not known:
        name = told.instance_type or "their instance type"
        doubt = f"they have {told.neuron_devices} Neuron devices, but {name} is not in the catalog."
    return replace(
        kind,
        instance_type=known.name if known else None,
        accelerators=kind.gpus or (known.accelerators if known else told.gpus),
        doubt=doubt,
        told=told,
        sources={**kind.sources, "instance_type": f"reported by {told.host}"},
    )


def _shown(told: Told) -> str:
    devices = {
        f"GPUs ({told.gpu})": told.gpus,
        "Neuron devices": told.neuron_devices,
        "EFA interfaces": told.efa,
    }
    words = [f"{number} {name}" for name, number in devices.items() if number]
    words += ["SageMaker HyperPod"] if told.hyperpod else []
    return ", ".join([told.host, told.instance_type or "unknown instance type", *words])


def _content(file: IO[bytes]) -> str:
    # pread, because the job writes at the position that it shares with us.
    return os.pread(file.fileno(), _MOST_BYTES, 0).decode("utf-8", "replace")
