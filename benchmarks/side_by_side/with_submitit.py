import runpy
import sys

import submitit


class Train:
    def __init__(self, *words):
        self.words = words

    def __call__(self):
        submitit.helpers.TorchDistributedEnvironment().export()
        sys.argv = ["train.py", *self.words]
        runpy.run_path("train.py", run_name="__main__")

    def checkpoint(self, *_):
        return submitit.helpers.DelayedSubmission(self)


nodes, *words = sys.argv[1:]
executor = submitit.AutoExecutor("log")
executor.update_parameters(nodes=int(nodes), tasks_per_node=1, timeout_min=10, slurm_exclusive=True)
print(executor.submit(Train(*words)).job_id)
