#!/bin/sh
# EpilogSlurmctld in slurm.conf: how each failed job ended and why, in its accounting record:
#
#   sacct --format JobID,State,AdminComment%100
#
# It runs as SlurmUser, which must be able to read the jobs' output. What a job prints is its user's word: it decides
# nothing here, and drains no node.

PATH=${HOLDFAST_PATH:-/opt/holdfast/bin}:/usr/local/bin:/usr/bin:/bin
[ "$SLURM_JOB_EXIT_CODE" = 0 ] && exit 0
job=$SLURM_JOB_ID
[ -n "$SLURM_ARRAY_JOB_ID" ] && job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
output=${SLURM_JOB_STDOUT:-$(scontrol --oneliner show job "$job" | sed -n 's/.* StdOut=\([^ ]*\).*/\1/p')}
[ -r "$output" ] || exit 0
comment=$(timeout 600 holdfast diagnose --json "$output" 2>/dev/null | python3 -c '
import json, sys
found = json.load(sys.stdin)
who = " ".join(f"{name} {value}" for name, value in found["scope"].items())
why = "" if found["outcome"] == "completed" else f"""{found["reason"]} {found["confidence"]:.2f} """
print(f"""{found["outcome"]} {why}{found["action"]} {who}"""[:200].rstrip())
') || exit 0
scontrol update JobId="$job" AdminComment="$comment"
