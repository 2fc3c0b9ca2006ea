#!/bin/bash
#SBATCH --job-name=two_lines
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --open-mode=append

# The guard of the orchestrator takes the place of this shell, so that Slurm's signals reach it.
run_dir='/home/ana/two
#SBATCH --hold/logs/'"$SLURM_JOB_ID"_two_lines_20251122_041341
exec /opt/gpujob/bin/python3 -I -B -m launcher.guard "$run_dir"
