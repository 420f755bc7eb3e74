# The image of `eagle-eye orchestrate`: webhooks in, the site's own tools out. How to run it in Kubernetes: docs/how-to/kubernetes.md.

ARG BASE=docker.io/library/python:3.13.16-slim-trixie

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY schema schema
COPY orchestrators orchestrators
COPY planning planning
COPY client client
COPY cli cli
COPY packaging/container/install.sh ./
# A site's own index comes as a build secret, which leaves nothing in a layer.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf sh install.sh orchestrators

FROM ${BASE}
ARG BASE
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="eagle-eye-orchestrator" \
      org.opencontainers.image.description="Has Kubernetes or a program of yours do what Eagle Eye asks for" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The Eagle Eye authors" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE}"
COPY --from=build /opt/eagle-eye /opt/eagle-eye
COPY LICENSE /opt/eagle-eye/
RUN install -d -o 65532 -g 0 -m 0770 /var/lib/eagle-eye
ENV PATH=/opt/eagle-eye/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
EXPOSE 8472
USER 65532:65532
VOLUME ["/var/lib/eagle-eye"]
ENTRYPOINT ["eagle-eye"]
CMD ["orchestrate", "--help"]
