#!/bin/sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#
# Runs a command on all nodes. If it fails: asks why, and submits itself again only where that helps, without the
# node at fault; not where the work was done and only its teardown failed. Stops after HOLDFAST_ATTEMPTS attempts, and at once where somebody must mend the job first.
#
#   sbatch resubmit.sh python train.py

logs=${HOLDFAST_LOGS:-logs}/$SLURM_JOB_ID
attempt=${HOLDFAST_ATTEMPT:-1}
mkdir -p "$logs" || exit
began=$(date +%s)

srun --output="$logs/rank-%t.log" "$@" 2>"$logs/srun.err"
code=$?
[ "$code" -eq 0 ] && exit 0

# What the kernels and Slurm say of the same time, where this account may read it.
srun --overlap --ntasks-per-node=1 --output="$logs/kernel-%N.log" journalctl --dmesg --since="@$began"
sacct --json --jobs="$SLURM_JOB_ID" >"$logs/sacct.json"

holdfast diagnose --json "$logs" >"$logs.json" || exit "$code"
holdfast diagnose "$logs"
[ "$attempt" -ge "${HOLDFAST_ATTEMPTS:-4}" ] && exit "$code"

answer=$(python3 -c '
import json, sys
found = json.load(open(sys.argv[1]))
nodes = found["scope"].get("node", [])
# The command failed. Logs that do not say so (outcome running, unknown) are no reason not to try again.
silent = found["outcome"] in ("running", "unknown")
print("restart" if silent else found["action"] if found["restart_helps"] else "stop", *([nodes] if isinstance(nodes, str) else nodes))
' "$logs.json") || exit "$code"

set -f # what follows splits `answer`, which comes from logs, into words
action=${answer%% *}
[ "$action" = stop ] && exit "$code"
begin=now
[ "$action" = wait_and_retry ] && begin=now+5minutes
exclude=$HOLDFAST_EXCLUDE
for node in ${answer#"$action"}; do
    # Logs may name any machine: only those of this job are left out.
    scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -Fqx -e "${node%%.*}" && exclude=${exclude:+$exclude,}${node%%.*}
done
export HOLDFAST_ATTEMPT=$((attempt + 1)) HOLDFAST_EXCLUDE="$exclude"
sbatch --begin="$begin" ${exclude:+--exclude="$exclude"} "$0" "$@"
exit "$code"
