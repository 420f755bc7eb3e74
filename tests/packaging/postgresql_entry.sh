# What the image of PostgreSQL does with the settings that docker-compose.yml gives it, for Debian's programs. The socket
# is in /tmp: podman's own tmpfs on /run, of a container that cannot write where it lives, hides who may write below it.
set -eu
ls -ld /run /run/postgresql /tmp
bin=$(dirname "$(find /usr/lib/postgresql -name initdb)")
data=/var/lib/postgresql/data
if [ ! -s "$data/ready" ]; then
    # shellcheck disable=SC2086 - several words
    "$bin/initdb" -D "$data" -U "$POSTGRES_USER" --pwfile "$POSTGRES_PASSWORD_FILE" $POSTGRES_INITDB_ARGS
    echo "host all all all scram-sha-256" >> "$data/pg_hba.conf"
    "$bin/pg_ctl" -D "$data" -o "-k /tmp -c listen_addresses=" -w start
    [ "$POSTGRES_DB" = postgres ] || "$bin/createdb" -h /tmp -U "$POSTGRES_USER" "$POSTGRES_DB"
    "$bin/pg_ctl" -D "$data" -w stop
    echo yes > "$data/ready"
fi
exec "$bin/postgres" -D "$data" -k /tmp -c 'listen_addresses=*'
