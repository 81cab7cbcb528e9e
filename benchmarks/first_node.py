"""What the first node does for all others, on thousands of nodes: seconds of its CPU.

    .venv/bin/python benchmarks/first_node.py --nodes 128 1000 4000

The first node's code is the real one: the preflight's meeting, and the program that hears the signs
of life of a training. All other nodes are one process here that speaks their protocol, so that
network, file system and Slurm have no part in it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import resource
import select
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import reporting

from trnslurm.contract.attempt import Attempt
from trnslurm.contract.variables import Variable
from trnslurm.node.attempt.machine import Machine, Rules
from trnslurm.node.beats import PERIOD_S, Beats, Sender
from trnslurm.node.meeting import Rendezvous
from trnslurm.node.preflight.needs import Needs
from trnslurm.node.preflight.program import Preflight

NODES = (128, 1000, 4000)
BEATS_S = 20.0
# What a node of eight GPUs says, about a kilobyte.
FACTS = {f"fact {number}": "x" * 40 for number in range(16)}


def main() -> None:
    """Measure each number of nodes in turn."""
    parser = reporting.make_parser("Measure the first node's part.", rounds=3)
    at_least_one = reporting.at_least_one
    parser.add_argument("--nodes", type=at_least_one, nargs="+", default=NODES, metavar="N",
                        help="numbers of nodes (128 1000 4000)")  # fmt: skip
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows = []
    for nodes in options.nodes:
        rounds = [meeting(nodes) | beats(nodes) for _ in range(options.rounds)]
        row = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        rows.append({"nodes": nodes} | {name: round(value, 2) for name, value in row.items()})
    columns = {"nodes": ("nodes", ",")} | {
        name: (name, ".2f") for name in rows[0] if name != "nodes"
    }
    reporting.report("The first node of a job", rows, columns, options.json)


def meeting(nodes: int) -> dict[str, float]:
    """Let all nodes report to the preflight at once; return how long that takes."""
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("", 0)) as free:
        run, port = Path(directory), free.getsockname()[1]
        (run / "code").mkdir()
        (run / "state").mkdir()
        free.close()
        place = Rendezvous(
            purpose="preflight", node=0, hosts=tuple(f"node-{n}" for n in range(nodes)),
            address="127.0.0.1", port=port, run=run, phase="train", attempt=1,
        )  # fmt: skip
        needs = Needs(run=run, phase="train", nodes=nodes, devices=0, workers=1, efa=0,
                      data="", caches=(), min_free=0)  # fmt: skip
        begin = multiprocessing.Event()
        others = multiprocessing.Process(target=report_all, args=(place, begin), daemon=True)
        others.start()
        begin.wait()
        cpu, start = time.process_time(), time.monotonic()
        answer = Preflight(place, needs, wait_s=60.0).compare()
        took = {
            "preflight, s": time.monotonic() - start,
            "preflight, CPU s": time.process_time() - cpu,
        }
        others.join()
        missing = [text for text in answer["others"] if "report" in text]
        assert not missing, missing
        return took


def report_all(place: Rendezvous, begin: Any) -> None:
    """All other nodes, each as join and report do it."""

    async def node(number: int) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
                break
            except OSError:
                await asyncio.sleep(0.1)
        await reader.readline()

        def send(data: Any) -> None:
            writer.write(json.dumps(data).encode() + b"\n")

        send({"meeting": place.name, "node": number})
        await reader.readline()
        send({"time": time.time()})
        report = {"node": number, "host": place.hosts[number], "seconds": 0.1, "facts": FACTS}
        send(report | {"problems": {}, "warnings": [], "same": {}})
        await reader.readline()
        writer.close()

    async def run() -> None:
        begin.set()
        await asyncio.gather(*(node(number) for number in range(1, len(place.hosts))))

    asyncio.run(run())


def beats(nodes: int) -> dict[str, float]:
    """Let all nodes send heartbeats for a while; return what receiving them costs."""
    heard = Beats("127.0.0.1")
    os.environ[Variable.BEATS] = heard.place
    hosts = [f"node-{n}" for n in range(nodes)]
    state = Attempt(phase="train", attempt=1, hosts=",".join(hosts))
    machine = Machine(Rules(trains=True, beats=True, replaces=True), state, hosts)
    machine._run()
    machine._taken()
    others = multiprocessing.Process(target=beat_all, args=(nodes,), daemon=True)
    others.start()
    count, cpu, until = 0, time.process_time(), time.monotonic() + BEATS_S
    while (left_s := until - time.monotonic()) > 0:
        select.select([heard], [], [], min(left_s, PERIOD_S))
        for beat in heard.read():
            count += 1
            machine.on(beat, time.monotonic())
    used = time.process_time() - cpu
    others.terminate()
    others.join()
    heard.close()
    return {"beats/s": count / BEATS_S, "CPU of them, %": 100 * used / BEATS_S}


def beat_all(nodes: int) -> None:
    """All other nodes, spread over the period as they started."""
    senders = [Sender(1, number) for number in range(1, nodes)]
    start = time.monotonic()
    for turn in range(1_000):
        for number, sender in enumerate(senders):
            due = start + PERIOD_S * (turn + number / nodes)
            if (early_s := due - time.monotonic()) > 0.001:
                time.sleep(early_s)
            sender.send()
            sender.told_to_end()


if __name__ == "__main__":
    main()
