"""A causal language model fine-tuned with LoRA (peft) by Hugging Face's Trainer.

    pip install peft
    trnslurm submit ./train.py --nodes 2 -- --output_dir {checkpoints} \
      --resume_from_checkpoint {resume} --learning_rate 0.02 --logging_steps 1 --save_steps 10 \
      --report_to none

Without --model, the script creates a small Llama whose tokens are bytes, so it needs no download.
RunCallback reports the loss, saves when the job is asked to stop, and passes on checkpoints.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from trnslurm.train.trainer import RunCallback


@dataclass
class Arguments:
    model: str = field(default="", metadata={"help": "a model on the Hub, or a directory"})
    text: Path = field(default=Path(__file__), metadata={"help": "the text to learn"})
    context: int = 32
    rank: int = 4


def main() -> None:
    ours, arguments = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    if ours.model:
        model = AutoModelForCausalLM.from_pretrained(ours.model)
        ids = AutoTokenizer.from_pretrained(ours.model)(ours.text.read_text())["input_ids"]
    else:
        config = LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=ours.context,
        )  # fmt: skip
        model, ids = AutoModelForCausalLM.from_config(config), list(ours.text.read_bytes())
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=ours.rank, target_modules=["q_proj", "v_proj"], lora_dropout=0.1
    )
    model = get_peft_model(model, lora)
    rows = torch.tensor(ids[: len(ids) // ours.context * ours.context]).view(-1, ours.context)
    trainer = Trainer(
        model, arguments, callbacks=[RunCallback()],
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()  # the adapter alone


if __name__ == "__main__":
    main()
