#!/bin/bash
#SBATCH --job-name=job
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=9
#SBATCH --gres=gpu:8
#SBATCH --time=01:00:00
#SBATCH --partition=gpu
#SBATCH --chdir=/home/ana/work
#SBATCH --output=/home/ana/work/logs/%j_2P_1D_20251122_041341/log.out
#SBATCH --error=/home/ana/work/logs/%j_2P_1D_20251122_041341/log.err
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --nice=5
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=9
#SBATCH --gres=gpu:8
#SBATCH --time=01:00:00
#SBATCH --partition=gpu
#SBATCH --nice=5

# The guard of the orchestrator takes the place of this shell, so that Slurm's signals reach it.
run_dir=/home/ana/work/logs/"$SLURM_JOB_ID"_2P_1D_20251122_041341
exec /opt/gpujob/bin/python3 -I -B -m launcher.guard "$run_dir"
