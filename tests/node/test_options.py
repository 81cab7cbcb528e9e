"""The options of an attempt: the words that a script has are the options that it gets."""

from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st

from trnslurm.contract.options import BY_SHELL, AttemptOptions, parse

COUNT = st.integers(0, 4000)
HOURS = st.integers(0, 1000).map(lambda n: n / 8)


@given(
    st.builds(
        AttemptOptions,
        nodes=COUNT, max_crashes=COUNT, spares=COUNT, exclude_hours=HOURS, hang_minutes=HOURS,
        graphs=st.booleans(), requeue=st.booleans(), fewer=st.booleans(),
        leave_out_slow=st.booleans(), standby=st.booleans(), expedite=st.booleans(),
        script=st.sampled_from(["", BY_SHELL]),
    )
)  # fmt: skip
def test_a_script_gives_what_was_rendered(options: AttemptOptions) -> None:
    words = options.words().replace(BY_SHELL, "'/a b/train.sbatch'")
    options.script = options.script and "/a b/train.sbatch"
    options.command = ["srun", "--", "x"]
    assert parse([*shlex.split(words), "--", "srun", "--", "x"]) == options
