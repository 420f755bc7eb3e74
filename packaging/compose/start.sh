#!/bin/sh
# What docker-compose.yml has done before and beside the server, in the server's image.
#
#     start.sh tokens       makes what opens the server, once: before it serves, so that it never serves without
#     start.sh subscribe    has the server tell Alertmanager (and, with a receiver's URL, the demo's receiver)
#     start.sh fault        replays a simulated fault
#     start.sh fleet        simulated agents
#
# Tokens and secrets lie in volumes: /var/lib/eagle-eye-tokens/read for Prometheus, .../admin for the steps here.
set -eu
umask 077
tokens=/var/lib/eagle-eye-tokens
server=http://server:8470

# A file appears whole or not at all: who is ended in the middle begins anew.
made() { # made FILE COMMAND...
    file=$1
    shift
    if [ ! -s "$file" ]; then
        "$@" > "$file.partial"
        mv "$file.partial" "$file"
    fi
}

secret() {
    python3 -c 'import base64, secrets; print("whsec_" + base64.b64encode(secrets.token_bytes(32)).decode())'
}

subscribed() { # subscribed NAME URL FORMAT TYPE...; the same secret again makes no second subscription
    name=$1 url=$2 format=$3
    shift 3
    made "$tokens/admin/secret-$name" secret
    # A container's name is known some seconds after it has started, and a name that nobody knows is refused.
    tries=30
    until eagle-eye subscriptions add "$url" --format "$format" "$@" --secret-file "$tokens/admin/secret-$name" \
        --server "$server" --token-file "$tokens/admin/token" > /dev/null; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || exit 1
        sleep 2
    done
    echo "$name is told at $url"
}

case $1 in
tokens)
    made "$tokens/admin/token" eagle-eye tokens create --scope admin
    made "$tokens/read/token" eagle-eye tokens create --scope read
    # Prometheus is another user. Only the containers that mount the volume come near the file.
    chmod 0755 "$tokens/read"
    chmod 0644 "$tokens/read/token"
    ;;
subscribe)
    subscribed alertmanager http://alertmanager:9093 alertmanager_api \
        --type eagle_eye.incident.opened --type eagle_eye.heartbeat
    if [ $# -gt 1 ]; then
        subscribed receiver "$2" cloudevents
    fi
    ;;
fault)
    rm -rf /tmp/trace
    eagle-eye simulate /tmp/trace --fault "${FAULT:-gpu_lost}" --nodes 8 --gpus 8 --minutes 6 --seed "${SEED:-1}"
    eagle-eye replay /tmp/trace --server "$server" --token-file "$tokens/admin/token" --speed "${SPEED:-2}"
    ;;
fleet)
    exec eagle-eye loadtest --server "$server" --token-file "$tokens/admin/token" --yes \
        --nodes 16 --gpus 8 --job-nodes 8 --prefix demo --duration 86400
    ;;
*)
    echo "expected tokens, subscribe, fault or fleet, got $1" >&2
    exit 2
    ;;
esac
