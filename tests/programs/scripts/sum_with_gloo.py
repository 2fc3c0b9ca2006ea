"""A sum over all processes with torch.distributed, from the variables of the environment."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank())
dist.all_reduce(total)
print("Processed 1/1 items")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, local rank {os.environ['LOCAL_RANK']}: sum {total.item()}")
dist.destroy_process_group()
