#!/bin/sh
# What docker-compose.yml has done before and beside the server, in the server's image.
#
#     start.sh tokens       makes what opens the server, once: before it serves, so that it never serves without
#     start.sh records      moves what the server has kept in its file to PostgreSQL, once
#     start.sh server       serves; with records in PostgreSQL once they are there
#     start.sh subscribe    has the server tell Alertmanager (and, with a receiver's URL, the demo's receiver)
#     start.sh fault        replays a simulated fault
#     start.sh fleet        simulated agents
#
# Tokens and secrets lie in volumes: /var/lib/eagle-eye-tokens/read for Prometheus, .../admin for the steps here,
# .../records for PostgreSQL and who has records there.
set -eu
umask 077
tokens=${TOKENS:-/var/lib/eagle-eye-tokens}
server=${SERVER:-http://server:8470}

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
    made "$tokens/records/password" python3 -c 'import secrets; print(secrets.token_urlsafe(32))'
    # Prometheus and PostgreSQL are other users. Only the containers that mount the volumes come near the files.
    chmod 0755 "$tokens/read" "$tokens/records"
    chmod 0644 "$tokens/read/token" "$tokens/records/password"
    ;;
records)
    if [ -z "${EAGLE_EYE_RECORDS_URL:-}" ]; then
        echo "the profile ha needs its settings: docker compose --env-file packaging/compose/ha.env --profile ha up" >&2
        exit 2
    fi
    # The tokens that were made in the file are among the records.
    listed=$(eagle-eye tokens list --json)
    tries=30
    while [ "$listed" = "[]" ]; do
        eagle-eye records copy --from "sqlite:$EAGLE_EYE_DATA_DIR" --to "$EAGLE_EYE_RECORDS_URL" \
            --password-file "$EAGLE_EYE_RECORDS_PASSWORD_FILE" && break
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || exit 1
        sleep 2 # a server of before the move is being ended
    done
    ;;
server)
    if [ -n "${EAGLE_EYE_RECORDS_URL:-}" ]; then
        until listed=$(eagle-eye tokens list --json) && [ "$listed" != "[]" ]; do
            sleep 2
        done
    fi
    exec eagle-eye server --config /etc/eagle-eye/server.toml
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
    echo "expected tokens, records, server, subscribe, fault or fleet, got $1" >&2
    exit 2
    ;;
esac
