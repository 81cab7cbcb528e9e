"""Write a checkpoint as a Hugging Face folder, which from_pretrained loads. In a run directory:

    PYTHONPATH=code/trnslurm.zip python code/jobs/gpt2_zero1/export.py plan.json

`trnslurm export RUN` does this with the Python interpreter of the run's cluster.
"""

from transformers import GPT2Config, GPT2LMHeadModel

from trnslurm.train.export.folder import export_job, text_tokens
from trnslurm.train.loop.job import run_job
from trnslurm.train.plan import JobPlan


def make_model(plan: JobPlan, end_of_text: int | None) -> GPT2LMHeadModel:
    """Build a plan's model, whose parameters are set later."""
    config = GPT2Config(**plan.model, bos_token_id=end_of_text, eos_token_id=end_of_text)
    return GPT2LMHeadModel(config)


if __name__ == "__main__":
    run_job(lambda: export_job(make_model, text_tokens))
