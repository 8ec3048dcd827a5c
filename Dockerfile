# The image that pods run: a CPU and a CUDA variant, with MPICH or Open MPI.
#
#   docker build -t ortflow .
#   docker build -t ortflow:openmpi --build-arg MPI=openmpi .
#   docker build -t ortflow:cuda --build-arg VARIANT=cuda .
#
# Pin a base by digest: --build-arg CPU_BASE=python:3.11-slim-bookworm@sha256:...
# What changes often comes last: a change of ortflow's own source makes two small layers anew.

ARG CPU_BASE=python:3.11-slim-bookworm
ARG VARIANT=cpu

FROM ${CPU_BASE} AS cpu

# CUDA comes as Python packages; of the node it needs the driver, which NVIDIA's container runtime brings in.
FROM ${CPU_BASE} AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${VARIANT} AS base
# Host keys would be the same in every copy of the image: sshd of a run brings its own.
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends openssh-server openssh-client && \
    rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* && \
    mkdir -p /run/sshd
# Clusters that give each namespace its own user id run it in group 0, which adds the user's account.
# Pods of a run have new names and new keys each time; who may log in is told by the key that the operator makes.
RUN printf 'Host *\n  Port 2222\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' \
      > /etc/ssh/ssh_config.d/ortflow.conf && \
    useradd --create-home --uid 1000 --shell /bin/bash ortflow && \
    install -d -m 700 -o ortflow -g ortflow /home/ortflow/.ssh && \
    chgrp -R 0 /home/ortflow && chmod -R g=u /home/ortflow /etc/passwd
RUN python3 -m venv /opt/ortflow
ENV PATH=/opt/ortflow/bin:$PATH PYTHONUNBUFFERED=1

FROM base AS requirements
ARG VARIANT
COPY pyproject.toml docker/requirements.py /build/
RUN pip install --no-cache-dir 'tomli>=2' && \
    python /build/requirements.py ${VARIANT} > /build/requirements.txt && \
    python /build/requirements.py mpi > /build/mpi.txt

FROM base AS kernels
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*
COPY workflow/kernels /build/kernels
RUN python3 /build/kernels/library.py /kernels

FROM base AS wheel
RUN pip install --no-cache-dir 'setuptools>=77' wheel
COPY pyproject.toml README.md LICENSE /build/
COPY ortflow /build/ortflow
COPY workflow /build/workflow
COPY launchers /build/launchers
COPY manifests /build/manifests
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel /build

FROM base AS image
COPY --from=requirements /build/requirements.txt /opt/ortflow/requirements.txt
RUN pip install --no-cache-dir -r /opt/ortflow/requirements.txt
ARG MPI=mpich
COPY --from=requirements /build/mpi.txt /opt/ortflow/mpi.txt
RUN pip install --no-cache-dir --constraint /opt/ortflow/mpi.txt ${MPI}
COPY --from=kernels /kernels /opt/ortflow/share/ortflow/kernels
COPY examples /opt/ortflow/examples
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel pip install --no-cache-dir --no-deps --no-index /wheel/*.whl
LABEL org.opencontainers.image.title=ortflow org.opencontainers.image.licenses=MIT
USER 1000:1000
WORKDIR /home/ortflow
HEALTHCHECK NONE
CMD ["ortflow", "--help"]
