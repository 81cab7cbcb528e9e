import os
import sys

import nemo_run as run

nodes, *words = sys.argv[1:]
executor = run.SlurmExecutor(
    account="root", nodes=int(nodes), ntasks_per_node=1, time="00:10:00", exclusive=True,
    launcher=run.Torchrun(), packager=run.Packager(), retries=3,
)  # fmt: skip
task = run.Script(os.path.abspath("train.py"), args=words, entrypoint="python")  # noqa: PTH100
run.run(task, executor=executor, name="train", detach=True)
