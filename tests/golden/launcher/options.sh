#!/bin/bash
#SBATCH --job-name=embed-v2
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=64G
#SBATCH --gres=gpu:h100:8
#SBATCH --time=04:00:00
#SBATCH --partition=gpu
#SBATCH --account=nlp
#SBATCH --qos=normal
#SBATCH --chdir=/home/ana/work
#SBATCH --output=/scratch/logs/%j_embed-v2_20251122_041341/log.out
#SBATCH --error=/scratch/logs/%j_embed-v2_20251122_041341/log.err
#SBATCH --open-mode=append
#SBATCH --constraint='h100&nvlink'
#SBATCH --exclusive
#SBATCH --mail-type=END
#SBATCH --nice=5
#SBATCH --requeue

# The guard of the orchestrator takes the place of this shell, so that Slurm's signals reach it.
run_dir=/scratch/logs/"$SLURM_JOB_ID"_embed-v2_20251122_041341
exec /opt/gpujob/bin/python3 -I -B -m launcher.guard "$run_dir"
