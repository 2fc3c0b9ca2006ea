#!/bin/bash
#SBATCH --job-name='__touch_pwned___a___b__Ü__c_'
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --chdir='/home/ana/50% of $(touch pwned) '"'"'a'"'"' "b" `c` node[01-03,7] Ü'
#SBATCH --output='/home/ana/50%% of $(touch pwned) '"'"'a'"'"' "b" `c` node[01-03,7] Ü/logs/%j_touch_pwned_a_b_Ü_c_20251122_041341/log.out'
#SBATCH --error='/home/ana/50%% of $(touch pwned) '"'"'a'"'"' "b" `c` node[01-03,7] Ü/logs/%j_touch_pwned_a_b_Ü_c_20251122_041341/log.err'
#SBATCH --open-mode=append
#SBATCH --comment='it'"'"'s $HOME; `x` # y'

# The guard of the orchestrator takes the place of this shell, so that Slurm's signals reach it.
run_dir='/home/ana/50% of $(touch pwned) '"'"'a'"'"' "b" `c` node[01-03,7] Ü/logs/'"$SLURM_JOB_ID"'_touch_pwned_a_b_Ü_c_20251122_041341'
exec /opt/gpujob/bin/python3 -I -B -m launcher.guard "$run_dir"
