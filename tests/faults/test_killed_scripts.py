"""A script on accelerate that Slurm and trnslurm resume after ten faults, on 2 to 4 nodes.

tests/local/test_killed.py says what is compared. TRNSLURM_SOAK_LIBRARY chooses another library.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial

import pytest

from ..local.test_killed import SCRIPT, SEED, Scripts
from ..sandbox.jobs import User
from ..waiting import eventually

pytestmark = pytest.mark.soak

LIBRARY = os.environ.get("TRNSLURM_SOAK_LIBRARY", "accelerate")
FAULTS = 10
OFF, ON = (3, 6), 8
"""These turn a node off, without which the run continues, and all of them on again."""


def test_ten_faults_change_nothing(user: User) -> None:
    scripts, rng = Scripts(LIBRARY, user.home), random.Random(SEED)
    script = user.home / "train.py"
    script.write_bytes(SCRIPT.read_bytes())
    sets = (
        f"python={scripts.python}",
        "device=cpu",
        "devices=[cpu]",
        "workers_per_node=1",
        "slurm.max_crashes=100",
    )
    variables = scripts.environment()
    own = [f"env.{name}='{variables[name]}'" for name in
           ("OMP_NUM_THREADS", "USE_TORCH_XLA", "ACCELERATE_USE_CPU")]  # fmt: skip
    options = user.options(4, *sets, *own)
    options[options.index("4")] = "2-4"
    run = user._submit(
        str(script), *options, "--time", "60", "--", *scripts.words, "--pause", "0.05"
    )
    last, off = 0, []
    for number in range(1, FAULTS + 1):
        last = eventually(partial(scripts.reached, last, rng.randrange(15)), 300, said=run.story)
        time.sleep(rng.uniform(0, 0.3))
        nodes = [node for node, state in user.sandbox.nodes().items()
                 if node not in off and state.startswith("alloc")]  # fmt: skip
        if number in OFF:
            off.append(rng.choice(nodes))
            user.sandbox.fault(off[-1], "power-off")
        else:
            user.sandbox.fault("proc", rng.choice(nodes), f"train.py {LIBRARY}", "KILL")
        if number == ON:
            for node in off:
                user.sandbox.fault(node, "power-on")
            off = []
        print(f"{number}: attempt {last}, {scripts.step(last) + 1} steps in, off: {off}")
    run.until("COMPLETED", 900)
    print(scripts.check())
