"""A sum over all processes with MPI."""

from mpi4py import MPI

total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)
print("Processed 1/1 items")
print(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}: sum {total}")
