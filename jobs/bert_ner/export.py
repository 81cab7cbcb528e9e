"""Write a checkpoint as a Hugging Face folder, which from_pretrained loads. In a run directory:

    PYTHONPATH=code/trnslurm.zip python code/jobs/bert_ner/export.py plan.json

`trnslurm export RUN` does this with the Python interpreter of the run's cluster.
"""

from functools import partial

from trnslurm.train.export.bert import labelled_tokens, make_classifier
from trnslurm.train.export.folder import export_job
from trnslurm.train.loop.job import run_job

if __name__ == "__main__":
    run_job(lambda: export_job(partial(make_classifier, of_words=True), labelled_tokens))
