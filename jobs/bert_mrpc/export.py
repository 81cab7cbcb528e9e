"""Write a checkpoint as a Hugging Face folder, which from_pretrained loads. In a run directory:

    PYTHONPATH=code python code/jobs/bert_mrpc/export.py plan.json

`trnslurm export RUN` does this with the Python of the run's cluster.
"""

from trnslurm.train.bert_export import labelled_tokens, make_classifier
from trnslurm.train.errors import run_job
from trnslurm.train.export import export_job

if __name__ == "__main__":
    run_job(lambda: export_job(make_classifier, labelled_tokens))
