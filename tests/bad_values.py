"""Values that no job can use, and what is said of them: by the launcher and by the job."""

from __future__ import annotations

GPT2, LLAMA = "gpt2_zero1", "llama3_clm"
BERT, MRPC, TWEETS = "bert_pretrain", "bert_mrpc", "bert_sentiment"
NER = "bert_ner"

# Recipe, settings (section.key: value), and the refusal.
BAD = [
    (GPT2, {"train.optimizer": "adamv"},
     "train.optimizer is 'adamv' (did you mean \"adam\"?); expected one of adamw, adam, sgd"),
    (GPT2, {"train.optimizer": "lamb"},
     "train.optimizer is 'lamb'; expected one of adamw, adam, sgd"),
    (GPT2, {"train.schedule": "cosin"},
     "train.schedule is 'cosin' (did you mean \"cosine\"?); expected one of cosine, linear, "
     "constant"),
    (GPT2, {"train.lr": -1.0}, "train.lr is -1.0; it must be at least 0"),
    (GPT2, {"train.keep_last": 0}, "train.keep_last is 0; it must be at least 1"),
    (GPT2, {"train.beta2": 1.0}, "train.beta2 is 1.0; it must be less than 1"),
    (GPT2, {"train.eval_samples": 0}, "train.eval_samples is 0; it must be at least 1"),
    (GPT2, {"model.n_head": 3},
     "model.n_head is 3; it must divide model.n_embd, 64; nearest: 2 or 4"),
    (GPT2, {"model.n_layer": 0}, "model.n_layer is 0; it must be at least 1"),
    (GPT2, {"model.attn_pdrop": 1.0}, "model.attn_pdrop is 1.0; it must be less than 1"),
    (GPT2, {"model.activation_function": "gelu_neu"},
     "model.activation_function is 'gelu_neu' (did you mean \"gelu_new\"?); expected one of"),
    (GPT2, {"seq_len": 65}, "model.n_positions is 64; it must be at least seq_len, 65"),
    (BERT, {"train.optimizer": "lamb", "train.zero1": True},
     "train.optimizer is 'lamb' and train.zero1 is true: lamb needs the norms of whole parameters"),
    (BERT, {"train.optimizer_precision": "fp32_state", "train.zero1": True},
     "train.optimizer_precision is 'fp32_state' and train.zero1 is true: ZeRO-1 has one type"),
    (GPT2, {"train.optimizer_precision": "fp32_state"},
     "train.optimizer_precision is 'fp32_state'; expected one of fp32_copy, as_model"),
    (BERT, {"train.optimizer_precision": "fp16"},
     "train.optimizer_precision is 'fp16'; expected one of fp32_copy, fp32_state, as_model"),
    (BERT, {"train.max_pred": 0}, "train.max_pred is 0; it must be at least 1"),
    (BERT, {"data.path": ""}, "data.path is '': name a directory of HDF5 shards"),
    (TWEETS, {"data.path": ""}, "data.path is '': name a directory of labelled data"),
    (BERT, {"seq_len": 65},
     "model.max_position_embeddings is 64; it must be at least seq_len, 65"),
    (MRPC, {"model.num_attention_heads": 7},
     "model.num_attention_heads is 7; it must divide model.hidden_size, 64; nearest: 4 or 8"),
    (MRPC, {"model.num_labels": 0}, "model.num_labels is 0; it must be at least 1"),
    (MRPC, {"model.model_type": "robreta"},
     "model.model_type is 'robreta' (did you mean \"roberta\"?); expected one of bert, roberta, "),
    (MRPC, {"model.model_type": "distilbert"},
     "model.model_type is 'distilbert' and model.type_vocab_size is 2: DistilBERT has no segm"),
    (MRPC, {"model.model_type": "roberta", "model.pad_token_id": 1,
            "model.max_position_embeddings": 64, "seq_len": 63},
     "model.model_type is 'roberta' and model.pad_token_id is 1 and model.max_position_embeddings "
     "is 64 and seq_len is 63: RoBERTa reserves two positions: use at least seq_len + 2"),
    (NER, {"model.type_vocab_size": 0},
     "model.model_type is 'bert' and model.type_vocab_size is 0: only DistilBERT has no segmen"),
    (NER, {"train.keep_best": "f1"},
     "train.keep_best is 'f1'; expected one of empty, loss, accuracy, entity_f1, entity_precision"),
    (TWEETS, {"train.save_every": 7},
     "train.keep_best is 'macro_f1' and train.save_every is 7 and train.eval_every is 20: "
     "checkpoints would be saved at steps without an evaluation"),
    (TWEETS, {"train.eval_every": 0},
     "train.keep_best is 'macro_f1' and train.save_every is 20 and train.eval_every is 0: "),
    (TWEETS, {"train.keep_best": "macrof1"},
     "train.keep_best is 'macrof1' (did you mean \"macro_f1\"?); expected one of empty, loss, "),
    (LLAMA, {"model.num_key_value_heads": 3},
     "model.num_key_value_heads is 3; it must divide model.num_attention_heads, 4; "
     "nearest: 2 or 4"),
    (LLAMA, {"model.tie_word_embeddings": True},
     "model.tie_word_embeddings is true: a sharded model cannot share a parameter"),
    (LLAMA, {"train.optimizer": "lamb"}, "train.optimizer is 'lamb'; expected one of adamw, sgd"),
    (LLAMA, {"train.attention": "flash_attention_2"},
     "train.attention is 'flash_attention_2' and device is 'cpu': it needs a GPU"),
    (LLAMA, {"train.attention": "flash"},
     "train.attention is 'flash'; expected one of auto, sdpa, flash_attention_2, eager"),
    (LLAMA, {"precision": "mixed"},
     "precision is 'mixed': it works only for models that are not sharded"),
]  # fmt: skip
