# The image that a cluster trains in; docs/image.md tells how to build, import and submit it.
#
#   docker build -t mamba-train .
#   docker build -t mamba-train --build-arg STACK=current .        newer torch, for newer GPUs
#
#   BASE_IMAGE         any Debian or Ubuntu with Python 3.10 or 3.11; the default adds the CUDA toolkit
#   STACK              torch2.2 or current: which requirements/*.txt
#   INSTALL_KERNELS    auto: the fused CUDA kernels when the base image has CUDA; 1: always; 0: never (slower, portable)
#   INSTALL_EFA        1: libfabric and aws-ofi-nccl for AWS's network; 0: without
#
# Steps stand in the order in which they change, rarest first: a change of the project's code repeats only the last two.
ARG BASE_IMAGE=nvidia/cuda:12.1.1-devel-ubuntu22.04
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

# gcc and the headers are not for building this image: Triton compiles a launcher for every kernel when training starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ARG INSTALL_EFA=1
ARG EFA_INSTALLER_VERSION=1.47.0
# The kernel module and limits belong to the host. The installer registers its libraries with ldconfig.
# hadolint ignore=DL3003,DL3008
RUN if [ "$INSTALL_EFA" = 1 ]; then \
        apt-get update \
        && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends curl \
        && mkdir /tmp/efa && cd /tmp/efa \
        && curl -fsSL --retry 3 -o efa.tar.gz \
            "https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_INSTALLER_VERSION.tar.gz" \
        && tar -xzf efa.tar.gz && cd aws-efa-installer \
        && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \
        && cd / && rm -rf /tmp/efa \
        && apt-get purge -y --auto-remove curl && rm -rf /var/lib/apt/lists/* \
        && ldconfig && test -n "$(find /opt/amazon/ofi-nccl -name 'libnccl-net*.so')"; \
    else echo "without EFA: INSTALL_EFA=$INSTALL_EFA"; fi

# The environment is /usr/local itself: Enroot sources /etc/profile, which resets PATH, but /usr/local/bin
# stays in it; and an environment does not see the packages in a user's home. The stamp is what preflight compares.
ARG STACK=torch2.2
COPY requirements/${STACK}.txt requirements/kernels-${STACK}.txt /tmp/requirements/
RUN python3 -m venv /usr/local \
    && /usr/local/bin/pip install --no-cache-dir --disable-pip-version-check -r "/tmp/requirements/$STACK.txt" \
    && digest=$(sha256sum "/tmp/requirements/$STACK.txt") \
    && printf '%s\n%s\n' "$STACK" "${digest%% *}" > /usr/local/.complete

ARG INSTALL_KERNELS=auto
RUN if [ "$INSTALL_KERNELS" = 1 ] || { [ "$INSTALL_KERNELS" = auto ] && [ -d /usr/local/cuda ]; }; then \
        /usr/local/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps \
            -r "/tmp/requirements/kernels-$STACK.txt" \
        && python3 -c 'from importlib.metadata import version as v; v("mamba-ssm"); v("causal-conv1d")'; \
    else echo "without the fused CUDA kernels: INSTALL_KERNELS=$INSTALL_KERNELS and BASE_IMAGE decide"; fi

# Torch 2.2's Triton always uses the rank-0-only cache writer once patched; newer ones use it because of the variable.
COPY patches/ /opt/mamba-train/patches/
RUN /usr/local/bin/python3 /opt/mamba-train/patches/apply.py && rm -rf /tmp/requirements
ENV TRITON_CACHE_MANAGER=triton.runtime.rank0_cache:Rank0CacheManager \
    XDG_CACHE_HOME=/tmp/cache MPLCONFIGDIR=/tmp/cache/matplotlib
# /tmp is what can be written where the root is read-only, as it is under Enroot.

WORKDIR /opt/mamba-train
COPY . .
RUN chmod -R a+rX . && python3 -m mamba_fsdp selfcheck && rm -rf /tmp/cache
