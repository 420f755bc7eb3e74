# What the image of PostgreSQL does with the settings that docker-compose.yml gives it, for Debian's programs. The socket
# is in /tmp: on podman /run/postgresql cannot be written to, whatever mode the file gives it.
set -eu
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
