# The server's image. How to build and run it: docs/get-started/containers.md.

ARG BASE=docker.io/library/python:3.13.16-slim-trixie

FROM ${BASE} AS build
# "server,postgresql,ml" adds torch and scikit-learn for `eagle-eye train`; the server itself never needs them.
ARG EXTRAS=server,postgresql
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
# The server, and what works on its files: operator's commands, traces, models.
COPY schema schema
COPY detectors detectors
COPY server server
COPY learning learning
COPY simulator simulator
COPY client client
COPY cli cli
COPY packaging/container/install.sh ./
# A site's own index comes as a build secret, which leaves nothing in a layer.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf sh install.sh "${EXTRAS}"

FROM ${BASE}
ARG BASE
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="eagle-eye-server" \
      org.opencontainers.image.description="Takes the agents' frames, finds faults and tells subscribers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The Eagle Eye authors" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE}"
COPY --from=build /opt/eagle-eye /opt/eagle-eye
COPY LICENSE packaging/container/health.py /opt/eagle-eye/
COPY packaging/container/server.toml /etc/eagle-eye/server.toml
RUN install -d -o 65532 -g 0 -m 0770 /var/lib/eagle-eye-server \
    /var/lib/eagle-eye-tokens/read /var/lib/eagle-eye-tokens/admin /var/lib/eagle-eye-tokens/records
# The folder is in the environment, not in the file, so that `eagle-eye tokens` in this container finds it, too.
ENV PATH=/opt/eagle-eye/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    EAGLE_EYE_LISTEN=0.0.0.0:8470 \
    EAGLE_EYE_DATA_DIR=/var/lib/eagle-eye-server
EXPOSE 8470
USER 65532:65532
VOLUME ["/var/lib/eagle-eye-server"]
# Of /healthz, not /readyz: a server that cannot judge because no agent reports is no better for a restart.
HEALTHCHECK --interval=30s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python3", "-I", "-S", "/opt/eagle-eye/health.py", "server"]
ENTRYPOINT ["eagle-eye"]
CMD ["server", "--config", "/etc/eagle-eye/server.toml"]
