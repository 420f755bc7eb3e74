# The agent's image. How to build and run it, and what each permission is for: docs/get-started/containers.md.

ARG BASE=docker.io/library/python:3.13.16-slim-trixie

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
# What a GPU host runs; commands of the other portions say that they are not part of this installation.
COPY schema schema
COPY agent agent
COPY checks checks
COPY checkpoint checkpoint
COPY client client
COPY cli cli
COPY packaging/container/install.sh ./
# A site's own index comes as a build secret, which leaves nothing in a layer.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf sh install.sh agent,checkpoint-store

FROM ${BASE}
ARG BASE
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="eagle-eye-agent" \
      org.opencontainers.image.description="Watches a GPU host and its training processes for Eagle Eye" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The Eagle Eye authors" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE}"
COPY --from=build /opt/eagle-eye /opt/eagle-eye
COPY LICENSE packaging/container/health.py /opt/eagle-eye/
COPY packaging/host/agent.toml /etc/eagle-eye/agent.toml
# For this image's own user, and for root (group 0) without CAP_DAC_OVERRIDE.
RUN install -d -o 65532 -g 0 -m 0770 /var/lib/eagle-eye-agent
# NVIDIA's runtime puts the driver's library (NVML) and nvidia-smi into containers that ask for "utility".
ENV PATH=/opt/eagle-eye/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
USER 65532:65532
VOLUME ["/var/lib/eagle-eye-agent"]
HEALTHCHECK --interval=60s --timeout=5s --start-period=60s --retries=2 \
    CMD ["python3", "-I", "-S", "/opt/eagle-eye/health.py", "agent"]
ENTRYPOINT ["eagle-eye"]
CMD ["agent", "--config", "/etc/eagle-eye/agent.toml"]
