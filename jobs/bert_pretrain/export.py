"""Write a checkpoint as a Hugging Face folder, which from_pretrained loads. In a run directory:

    PYTHONPATH=code python code/jobs/bert_pretrain/export.py plan.json

`trnslurm export RUN` does this with the Python of the run's cluster.
"""

from transformers import BertConfig, BertForPreTraining

from trnslurm.train.errors import run_job
from trnslurm.train.export import export_job
from trnslurm.train.plan import Plan


def make_model(plan: Plan, end_of_text: int | None) -> BertForPreTraining:
    """Make the model of a plan, whose parameters are yet to come; its samples need no token's."""
    return BertForPreTraining(BertConfig(**plan.model))


if __name__ == "__main__":
    run_job(lambda: export_job(make_model))
