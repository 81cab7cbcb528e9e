"""FSDP2 as anybody writes it: saves a model in both forms of PyTorch, or reads an exported folder.

foreign_worker.py save DIRECTORY        to DIRECTORY/plain and DIRECTORY/hf
foreign_worker.py back FOLDER DIRECTORY
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 13, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 8,
}  # fmt: skip


def make_model(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def main():
    what, place = sys.argv[1:3]
    dist.init_process_group("gloo")
    model = make_model(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if what == "save":
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4, dtype=torch.int64)).logits.sum().backward()
        state = get_model_state_dict(model)
        moments = get_optimizer_state_dict(model, optimizer)
        dcp.save({"model": state, "optim": moments, "step": 1}, checkpoint_id=f"{place}/plain")
        writer = dcp.HuggingFaceStorageWriter(f"{place}/hf", save_distributed=True)
        dcp.save(state, storage_writer=writer)
    else:
        state = get_model_state_dict(model)
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(place))
        dcp.save({"model": state}, checkpoint_id=sys.argv[3])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
