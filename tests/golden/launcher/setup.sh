#!/bin/bash
#SBATCH --job-name=job
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --exclusive
#SBATCH --segment=1
#SBATCH --time=04:00:00
#SBATCH --chdir=/home/ana/work
#SBATCH --output=/home/ana/work/logs/%j_job_20251122_041341/log.out
#SBATCH --error=/home/ana/work/logs/%j_job_20251122_041341/log.err
#SBATCH --open-mode=append
#SBATCH --dependency=afterok:4459:4460_3
#SBATCH --signal=B:USR1@120
#SBATCH --requeue

: # from here on nothing is a directive
# A batch shell is not a login shell: it may not know the module command yet.
# Lmod and Environment Modules set MODULESHOME in every shell, whatever a site calls its profile script.
for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh "${MODULESHOME:+$MODULESHOME/init/bash}"; do
  type module >/dev/null 2>&1 || { [ -r "$init" ] && . "$init"; }
done
module load cuda/12.4 || { printf '%s\n' 'gpujob: the module cuda/12.4 cannot be loaded; nothing was started' >&2; exit 1; }
module load gcc || { printf '%s\n' 'gpujob: the module gcc cannot be loaded; nothing was started' >&2; exit 1; }
ulimit -n 65536
module load openmpi/4.1 || { printf '%s\n' 'gpujob: the module openmpi/4.1 cannot be loaded; nothing was started' >&2; exit 1; }
[ -r '/home/ana/work/env'"'"'s.sh' ] || { printf '%s\n' 'gpujob: the setup script /home/ana/work/env'"'"'s.sh cannot be read; nothing was started' >&2; exit 1; }
. '/home/ana/work/env'"'"'s.sh'
#SBATCH --hold
export A=1

# The guard of the orchestrator takes the place of this shell, so that Slurm's signals reach it.
run_dir=/home/ana/work/logs/"$SLURM_JOB_ID"_job_20251122_041341
exec /opt/gpujob/bin/python3 -I -B -m launcher.guard "$run_dir"
