#!/bin/bash
#SBATCH --job-name=job
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --chdir=/home/ana/work
#SBATCH --output=/home/ana/work/logs/%j_job_20251122_041341/log.out
#SBATCH --error=/home/ana/work/logs/%j_job_20251122_041341/log.err
#SBATCH --open-mode=append

# The guard of the orchestrator takes the place of this shell, so that Slurm's signals reach it.
run_dir=/home/ana/work/logs/"$SLURM_JOB_ID"_job_20251122_041341
exec /opt/gpujob/bin/python3 -I -B -m launcher.guard "$run_dir"
