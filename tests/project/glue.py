"""A fine-tuning as transformers' run_glue.py is written, on rows that it makes up."""

import sys
from dataclasses import dataclass, field

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ModelArguments:
    hidden_size: int = field(default=16)
    told: bool = field(default=False, metadata={"help": "use trnslurm's callback"})


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, 60, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict:
        ids = self.ids[index]
        return {"input_ids": ids, "labels": (ids.sum() % 2)}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_arguments, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    size = model_arguments.hidden_size
    config = BertConfig(
        vocab_size=64, hidden_size=size, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=2 * size, max_position_embeddings=16,
    )  # fmt: skip
    callbacks = []
    if model_arguments.told:
        from trnslurm.train.trainer import RunCallback

        callbacks.append(RunCallback())
    trainer = Trainer(
        model=BertForSequenceClassification(config), args=arguments, train_dataset=Rows(64),
        eval_dataset=Rows(16), callbacks=callbacks,
    )  # fmt: skip
    result = trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    if trainer.is_world_process_zero():
        print(f"{arguments.world_size} workers, loss {result.training_loss:.4f}", file=sys.stderr)


if __name__ == "__main__":
    main()
