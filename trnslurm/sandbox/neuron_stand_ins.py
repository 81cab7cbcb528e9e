"""Stand-ins for Neuron's tools and fi_info on a sandbox's nodes: output, exit codes and traps.

    python -I neuron_stand_ins.py --home DIR neuron-ls --json-output

DIR/instance.json describes the instance to imitate. DIR/<hostname>/TOOL, or DIR/all/TOOL if that
does not exist, contains the fault to show: a word in BEHAVIORS. The output follows AWS's pages
about Neuron SDK 2.28 and public captures. These are guesses: the place of COMMAND in neuron-ls, its
output for a missing device, links of 2 to 15 devices, PCI and CPUs of types other than trn1; that
neuron_parallel_compile waits for stale locks, and that model.log records a failed compilation.

Missing: logical cores (trn2), the effect of -w, -a and -t, --version, the wording of usage errors,
the CPU and memory groups of neuron-monitor.
"""

import argparse
import json
import runpy
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

BEHAVIORS: dict[str, dict[str, str]] = {
    "neuron_parallel_compile": {
        "ok": "runs the command, then reports 4 graphs compiled",
        "failed-graphs": "2 of 4 graphs fail to compile: exit code 2",
        "failed-old": "2 of 4 graphs fail to compile, before Neuron 2.23: exit code 0",
        "failed-256": "all 256 graphs fail to compile: their number as an exit code is 0",
        "no-graphs": "finds no graph to compile: no summary, exit code 0",
        "exception": "a compile process dies: 2 of 4 graphs are not in the report, exit code 0",
        "script-error": "reports that the command failed, whatever it returned: exit code 1",
        "hang": "hangs after the command, until a signal ends it",
        "killed": "the compiler is killed (-9) on 2 of 4 graphs: exit code 2",
        "stale-lock": "waits for a compiler that has ended, until a signal ends it",
        "locked": "finds every graph locked by another node: compiles none, exit code 0",
        "slow": "compiles until its behavior changes; a signal makes it record a failure",
    },
    "neuron-ls": {
        "ok": "lists all devices of the instance",
        "missing-device": "lists one device fewer",
        "no-devices": "finds no device: nothing on stdout, exit code 1",
        "busy": "lists a leftover process on every device",
    },
    "neuron-monitor": {
        "ok": "prints one JSON document per period",
        "hbm-error": "counts an uncorrected memory error on device 0",
        "silent": "runs and prints nothing",
        "exit": "ends immediately: exit code 1",
    },
    "fi_info": {
        "ok": "lists the EFA interfaces of the instance",
        "no-provider": "finds no EFA: exit code 61",
        "missing-interface": "lists one interface fewer",
        "other-version": "reports another version of libfabric",
    },
}
LEFT_OVER_PID = 4_194_999  # shown by `busy`: above Linux's highest pid, so it names no process
_INSTANCE_ID = "i-00000000000000000"
_PCI = """10:1b 10:1e a0:1b a0:1e 20:1e 20:1c 90:1e 90:1c
          20:1d 20:1b 90:1d 90:1b 10:1c 10:1d a0:1c a0:1d"""
_KINDS = {"trn1": ("trainium", "v2", "v2"), "trn2": ("trainium2", "v4", "v3")}


def main(argv: Sequence[str]) -> int:
    """Run the tool that the command line names; return its exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback when the reader is gone
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    tool = argv[2] if len(argv) > 2 else "neuron_stand_ins"
    print(f"{tool}: this is a stand-in in a trnslurm sandbox, not a Neuron tool", file=sys.stderr)
    if tool not in TOOLS or argv[0] != "--home":
        fail(f"usage: neuron_stand_ins.py --home DIR {'|'.join(TOOLS)} [ARGUMENT ...]")
    home = Path(argv[1])
    return TOOLS[tool](home, read_behaviour(home, tool), argv[3:])


def read_behaviour(home: Path, tool: str) -> str:
    """Return the fault to show, for this host or for all."""
    for path in (home / socket.gethostname() / tool, home / "all" / tool):
        if path.is_file():
            word = path.read_text(encoding="utf-8", errors="replace").strip()
            if word not in BEHAVIORS[tool]:
                fail(f'{path}: unknown behavior "{word}", not in: {", ".join(BEHAVIORS[tool])}')
            return word
    return "ok"


def read_instance(home: Path) -> dict[str, Any]:
    """Return the instance to imitate."""
    try:
        found = json.loads((home / "instance.json").read_text(encoding="utf-8"))
        sizes = (int(found[key]) for key in ("devices", "cores_per_device", "device_gib"))
        return named("type num cores gib", str(found["instance_type"]), *sizes)
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"{home / 'instance.json'}: not an instance: {error!r}")


def neuron_parallel_compile(home: Path, behaviour: str, arguments: Sequence[str]) -> int:
    """Imitate the compiler, using the file next to this one: no package can be imported here."""
    file = Path(__file__).with_name("neuron_compile_stand_in.py")
    play: Any = runpy.run_path(str(file))["neuron_parallel_compile"]

    def behaviour_now() -> str:
        return read_behaviour(home, "neuron_parallel_compile")

    return int(play(home, behaviour, arguments, behaviour_now))


def neuron_ls(home: Path, behaviour: str, arguments: Sequence[str]) -> int:
    """List the devices, as a table or as JSON."""
    parser = argparse.ArgumentParser(prog="neuron-ls", allow_abbrev=False)
    for option in ("-j --json-output", "-w --wide", "-a --show-all-procs", "-t --topology"):
        parser.add_argument(*option.split(), action="store_true")
    parser.add_argument("--version", action="version", version="neuron-ls 0 (stand-in)")
    options = parser.parse_args(arguments)
    instance = read_instance(home)
    num = instance["num"] - (behaviour == "missing-device")
    if behaviour == "no-devices" or num < 1:
        now, text = f"{datetime.now(UTC):%FT%TZ}", "Failed to load MLA system information"
        cause = 'error="failed to discover Neuron devices"'
        print(f'time="{now}" level=fatal msg="{text}" {cause}', file=sys.stderr)
        return 1
    devices = [describe(instance, device, behaviour == "busy") for device in range(num)]
    if options.json_output:
        print(json.dumps(devices, indent=4), end="")
    else:
        print(f"instance-type: {instance['type']}\ninstance-id: {_INSTANCE_ID}")
        print_table(devices)
    return 0


def describe(instance: dict[str, Any], device: int, busy: bool) -> dict[str, Any]:
    """Return a device; 16 devices are a 4 x 4 torus, linked above, left, below and right."""
    _, num, cores, gib = instance.values()
    bdf, affinity, numa, links = "0000:00:1e.0", "0-7", "-1", None
    if num > 1:
        bdf = f"0000:{_PCI.split()[device % 16]}.0"
        affinity, numa = ("32-63,96-127", "1") if bdf[5] in "9a" else ("0-31,64-95", "0")
    if num == 16:
        row, left, right = device & ~3, (device - 1) & 3, (device + 1) & 3
        links = [(device - 4) % 16, row | left, (device + 4) % 16, row | right]
    ids = list(range(device * cores, (device + 1) * cores))
    process = named("pid command neuron_runtime_version", LEFT_OVER_PID, "python3 old.py", "2.0.0")
    place = named("neuron_device bdf cpu_affinity numa_node", device, bdf, affinity, numa)
    size = named("connected_to nc_count memory_size", links, cores, gib * 2**30)
    return place | size | named("neuroncore_ids neuron_processes", ids, [process] if busy else [])


def print_table(devices: list[dict[str, Any]]) -> None:
    """Print one row per device, without empty columns."""
    titles = "NEURON DEVICE,NEURON CORES,NEURON CORE IDS,NEURON MEMORY,CONNECTED DEVICES,PCI BDF"
    titles += ",PID ,COMMAND ,CPU AFFINITY,NUMA NODE,RUNTIME VERSION"
    rows = [*map(list, zip(*(title.split(" ", 1) for title in titles.split(",")), strict=True))]
    for device in devices:
        ids, links = device["neuroncore_ids"], ", ".join(map(str, device["connected_to"] or ()))
        pid, command, version = [*device["neuron_processes"], dict.fromkeys("pcv", "")][0].values()
        row = [device["neuron_device"], len(ids), f"{ids[0]}-{ids[-1]}"]
        row += [f"{device['memory_size'] // 2**30} GB", links, device["bdf"], pid, command]
        rows.append([str(c) for c in (*row, device["cpu_affinity"], device["numa_node"], version)])
    columns = [column for column in zip(*rows, strict=True) if any(column[2:])]
    widths = [max(map(len, column)) for column in columns]
    line = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    for number, cells in enumerate(zip(*columns, strict=True)):
        pairs = zip(cells, widths, strict=True)
        padded = [cell.center(w) if number < 2 else cell.ljust(w) for cell, w in pairs]
        print(f"{line}\n" * (number in (0, 2)) + f"| {' | '.join(padded)} |")
    print(line)


def neuron_monitor(home: Path, behaviour: str, arguments: Sequence[str]) -> int:
    """Print a JSON document at once and after every period."""
    parser = argparse.ArgumentParser(prog="neuron-monitor", allow_abbrev=False)
    parser.add_argument("-c", "--config-file", dest="period_s", type=read_period, default=5.0)
    parser.add_argument("--verbose", type=int, choices=range(5), help="has no effect")
    options = parser.parse_args(arguments)
    report = monitor_report(read_instance(home), options.period_s, behaviour == "hbm-error")
    while behaviour != "exit":
        if behaviour != "silent":
            print(json.dumps(report), flush=True)
        time.sleep(options.period_s)
    return 1


def read_period(path: str) -> float:
    """Return the period of a configuration file in seconds; periods of groups have no effect."""
    text = Path(path).read_text(encoding="utf-8") if Path(path).is_file() else ""
    period = str(dict(json.loads(text)).get("period", "5s"))
    unit_s = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}.get(period.lstrip("0123456789."), "no unit")
    return float(period.rstrip("mhs")) * float(unit_s)


def monitor_report(instance: dict[str, Any], period_s: float, bad: bool) -> dict[str, Any]:
    """Return the report of neuron-monitor for an instance on which no application runs."""
    keys = "neuron_device_index mem_ecc_uncorrected mem_ecc_corrected sram_ecc_uncorrected"
    kind, num, cores, gib = instance.values()
    ecc = [named(f"{keys} sram_ecc_corrected", n, int(bad and n == 0), 0, 0, 0) for n in range(num)]
    system = {"neuron_hw_counters": named("period neuron_devices error", period_s, ecc, "")}
    info = named("instance_id instance_type error", _INSTANCE_ID, kind, "")
    keys = "neuron_device_type neuron_device_version neuroncore_version"
    hardware = named(keys, *_KINDS.get(kind[:4], ("", "", "")))
    keys = "neuron_device_count neuron_device_memory_size neuroncore_per_device_count"
    hardware |= named(f"{keys} logical_neuroncore_config error", num, gib * 2**30, cores, 1, "")
    keys = "neuron_runtime_data system_data instance_info neuron_hardware_info"
    return named(keys, [], system, info, hardware)


def fi_info(home: Path, behaviour: str, arguments: Sequence[str]) -> int:
    """List EFA's endpoints, or print the version."""
    parser = argparse.ArgumentParser(prog="fi_info", allow_abbrev=False)
    parser.add_argument("-p", "--provider", default="efa")
    parser.add_argument("-t", "--ep_type", default="")
    parser.add_argument("--version", action="store_true")
    options = parser.parse_args(arguments)
    version = "1.22.0amzn4.0" if behaviour == "other-version" else "2.1.0amzn3.0"
    if options.version:
        print(f"fi_info: {version}\nlibfabric: {version}\nlibfabric api: 2.1")
        return 0
    num = read_interfaces(home) - (behaviour == "missing-interface")
    if behaviour == "no-provider" or num < 1 or options.provider != "efa":
        print("fi_getinfo: -61 (No data available)", file=sys.stderr)
        return 61
    for kind, protocol in (("RDM", "FI_PROTO_EFA"), ("DGRAM", "FI_PROTO_EFA")):
        suffix = {"RDM": "rdm", "DGRAM": "dgrm"}[kind]
        for number in range(num if options.ep_type in ("", f"FI_EP_{kind}") else 0):
            print("provider: efa\n    fabric: efa")
            print(f"    domain: rdmap{16 + number}s27-{suffix}\n    version: 201.0")
            print(f"    type: FI_EP_{kind}\n    protocol: {protocol}")
    return 0


def read_interfaces(home: Path) -> int:
    """Return the number of EFA interfaces of the instance to imitate."""
    try:
        return int(json.loads((home / "instance.json").read_text(encoding="utf-8"))["efa"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def named(keys: str, *values: Any) -> dict[str, Any]:
    """Return a dictionary of these keys and values."""
    return dict(zip(keys.split(), values, strict=True))


def fail(text: str) -> NoReturn:
    """Print an error line and exit."""
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


TOOLS = dict(
    zip(BEHAVIORS, (neuron_parallel_compile, neuron_ls, neuron_monitor, fi_info), strict=True)
)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
