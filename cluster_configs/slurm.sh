#!/usr/bin/env bash
# Slurm: one run on whole nodes, with a Ray of its own that lasts for the job.
#
#   sbatch cluster_configs/slurm.sh run quickstart --output /shared/runs/quickstart
#
# CHANGE the lines below; the environment must be on a file system that all nodes see, and so must --output.
#SBATCH --job-name=raytriever
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
# Without --no-kill Slurm would end the whole job with any node of it; Ray goes on with the others. This script and
# Ray's head are on the first node: with that one the run ends, and Slurm may start it anew (--requeue). On
# another first node the command then needs --force, because a lost node's lock can't be checked from there.
#SBATCH --no-kill
set -euo pipefail
if [ "$#" -eq 0 ]; then
    echo "usage: sbatch $0 COMMAND [ARGUMENTS]..., any raytriever command" >&2
    exit 2
fi

ENVIRONMENT=${RAYTRIEVER_ENVIRONMENT:-$HOME/raytriever/.venv} # CHANGE
export PATH="$ENVIRONMENT/bin:$PATH"

# A token of this job's own: other users of these nodes can neither join nor submit. It is in a file that only its owner
# reads, not on a command line.
RAY_AUTH_TOKEN_PATH="$HOME/.ray/slurm-$SLURM_JOB_ID.token"
( # the umask is the token's alone: what the run writes is for the group, too, where that is the custom here
    umask 077
    mkdir -p "$HOME/.ray"
    rm -f "$RAY_AUTH_TOKEN_PATH" # a job that is run again has the same number
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH"
)
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH RAY_USAGE_STATS_ENABLED=0
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300

NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES%%$'\n'*} # not by `| head -n 1`: a pipe that is closed early would end this script
# The first IPv4 address of the head that is not loopback. `hostname --ip-address` would ask /etc/hosts, where some
# systems give a machine's own name 127.0.1.1; then no node would take itself for the head.
HEAD_IP=${RAYTRIEVER_HEAD_IP:-$(srun --nodes=1 --ntasks=1 --nodelist="$HEAD" hostname -I \
    | awk '{for (i = 1; i <= NF && !found; i++) if ($i !~ /:|^127[.]/) {print $i; found = 1}}' || true)}
case "$HEAD_IP" in
"" | 127.*)
    echo "'$HEAD_IP' is no address by which other nodes could reach $HEAD, the head. Set RAYTRIEVER_HEAD_IP to the" \
        "one that it has in the nodes' network ('ip -4 address' there lists them), and submit again." >&2
    exit 2
    ;;
esac
PORT=$((20000 + SLURM_JOB_ID % 10000)) # of this job's own

# symmetric-run starts Ray on every node, runs the command on the first, stops Ray and ends with the command's code.
# Where Ray itself can't start it ends with 0, and srun with another code than the command's where a node was lost; so a
# file tells whether the command was reached, and its code.
MARK="$HOME/.ray/slurm-$SLURM_JOB_ID.done"
rm -f "$MARK"
export MARK RAY_ADDRESS="$HEAD_IP:$PORT"
# --cpus-per-task: since Slurm 22.05 srun doesn't take it over from sbatch, and Ray would share one CPU
# Ray lets anybody write into its session folder: on each node it lies in one that this user alone may enter
srun --kill-on-bad-exit=0 --no-kill --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    bash -c 'RAY_TMPDIR=$(raytriever session-folder) && export RAY_TMPDIR && unset RAY_ADDRESS && exec "$@"' start \
    ray symmetric-run --address "$HEAD_IP:$PORT" --min-nodes "$SLURM_NNODES" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats \
    -- bash -c 'export RAY_ADDRESS="$0"; raytriever "$@"; code=$?; echo $code > "$MARK"; exit $code' \
    "$RAY_ADDRESS" "$@" || true
if [ ! -s "$MARK" ]; then
    echo "The command left no exit code: Ray did not start on all nodes, or it was cut off. See the lines above." >&2
    exit 1
fi
code=$(< "$MARK")
rm -f "$MARK"
exit "$code"
