#!/usr/bin/env bash
# One machine with a Ray that stays, closed by a token, for jobs that are submitted to it (docs/reference/cluster.md). A single
# run needs none of this: `raytriever run …` starts a Ray of its own and stops it.
#
#   cluster_configs/single-node.sh start [OPTIONS OF ray start]
#   raytriever submit -- run quickstart --output "$PWD/runs/quickstart"
#   cluster_configs/single-node.sh stop
set -euo pipefail
TOKEN=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
DASHBOARD_PORT=${DASHBOARD_PORT:-8265}

case "${1:-}" in
start)
    shift
    if [ ! -s "$TOKEN" ]; then
        ( # the umask is the token's alone: jobs inherit that of Ray, and others may have to read what they write
            umask 077
            mkdir -p "$(dirname "$TOKEN")"
            head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$TOKEN"
        )
        echo "a new token is in $TOKEN"
    fi
    chmod 600 "$TOKEN"
    # Ray lets anybody write into its session folder: it lies in one that this user alone may enter
    RAY_TMPDIR=$(raytriever session-folder)
    # 127.0.0.2: Ray takes 127.0.0.1 for "not said" and would listen on the machine's outer address
    RAY_TMPDIR="$RAY_TMPDIR" RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$TOKEN" RAY_USAGE_STATS_ENABLED=0 \
        ray start --head --node-ip-address=127.0.0.2 --dashboard-host=127.0.0.1 --dashboard-port="$DASHBOARD_PORT" \
        --dashboard-agent-listen-port=0 --disable-usage-stats "$@"
    ;;
stop)
    ray stop # every Ray of this user on this machine
    ;;
*)
    echo "usage: $0 start [OPTIONS OF ray start] | stop" >&2
    exit 2
    ;;
esac
