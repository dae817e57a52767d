# The image that a cluster trains in; docs/image.md tells how to build, import and submit it.
#
#   docker build -t mamba-train .
#   docker build -t mamba-train --build-arg STACK=current .        newer torch, for newer GPUs, on x86-64 or Arm
#
#   STACK                torch2.2 or current: which requirements/*.txt
#   BASE_IMAGE           another Debian or Ubuntu with Python 3.10 or 3.11 to build on; pip brings CUDA
#   DEVEL_IMAGE          another image with nvcc, and with BASE_IMAGE's Python, to compile kernels in
#   INSTALL_KERNELS      1: mamba-ssm's and causal-conv1d's kernels, compiled by nvcc in a stage of their own (an hour on two
#                        cores), besides the project's own in Triton; 0: only the project's own, without nvcc
#   CUDA_ARCHITECTURES   the GPUs to compile these libraries for (see requirements/build_kernels.sh)
#   INSTALL_EFA          1: libfabric and aws-ofi-nccl for AWS's network; 0: without
#   PRUNE                1: remove what no rank loads (requirements/prune.sh); 0: keep it
#
# Steps are ordered by how often they change, rarest first: a change of the project's code repeats only the last two.
ARG STACK=torch2.2
ARG BASE_IMAGE
ARG DEVEL_IMAGE
ARG INSTALL_KERNELS=1
FROM docker.io/library/ubuntu:22.04 AS base
# NVIDIA deletes old tags; docs/image.md says what to do then.
FROM docker.io/nvidia/cuda:12.1.1-devel-ubuntu22.04 AS devel-torch2.2
FROM docker.io/nvidia/cuda:13.0.2-devel-ubuntu22.04 AS devel-current

# If they are wanted, the libraries' kernels are compiled in a stage of their own, so that the CUDA toolkit and the
# compilers stay out of the image. Defaults are repeated here for buildah 1.28, which otherwise does not see which stages
# are used.
# hadolint ignore=DL3006
FROM ${BASE_IMAGE:-base} AS kernels-0
RUN mkdir /wheels && echo "without mamba-ssm and causal-conv1d: INSTALL_KERNELS=0, the project's own kernels serve"

# hadolint ignore=DL3006
FROM ${DEVEL_IMAGE:-devel-${STACK:-torch2.2}} AS kernels-1
ARG STACK
ARG CUDA_ARCHITECTURES
ARG MAX_JOBS
COPY requirements/${STACK}.txt requirements/kernels-${STACK}.txt requirements/build_kernels.sh /build/
# hadolint ignore=DL3008
RUN mkdir /wheels \
    && apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ git python3 python3-dev python3-venv \
    && python3 -m venv /build/venv \
    && /build/venv/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check --constraint "/build/$STACK.txt" \
        torch numpy setuptools packaging ninja==1.13.0 wheel==0.45.1 \
    && PYTHON=/build/venv/bin/python bash /build/build_kernels.sh "$STACK" /wheels \
    && rm -rf /build/venv /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM kernels-${INSTALL_KERNELS:-1} AS kernels

# hadolint ignore=DL3006
FROM ${BASE_IMAGE:-base}

# gcc and the headers are not for building this image: Triton compiles a launcher for every kernel when training starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
    && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /usr/share/man /usr/share/locale

ARG INSTALL_EFA=1
ARG EFA_INSTALLER_VERSION=1.50.0
# The kernel module and limits belong to the host. The installer registers its libraries with ldconfig, from which NCCL
# loads libnccl-net.so, or libnccl-net-ofi.so as 1.train.sbatch asks it to: the build ends if neither is there.
# hadolint ignore=DL3003,DL3008
RUN if [ "$INSTALL_EFA" = 1 ]; then \
        apt-get update \
        && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends curl \
        && mkdir /tmp/efa && cd /tmp/efa \
        && { curl -fsSL --retry 3 -o efa.tar.gz \
            "https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_INSTALLER_VERSION.tar.gz" \
            || { echo "error: EFA installer $EFA_INSTALLER_VERSION can't be fetched; name another version:" \
                "--build-arg EFA_INSTALLER_VERSION=..., or leave EFA out: --build-arg INSTALL_EFA=0" >&2; exit 2; }; } \
        && tar -xzf efa.tar.gz && cd aws-efa-installer \
        && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \
        && cd / && rm -rf /tmp/efa /opt/amazon/openmpi* \
        && apt-get purge -y --auto-remove curl && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
        && ldconfig && ldconfig -p > /tmp/libraries && grep -E '\slibnccl-net(-ofi)?\.so ' /tmp/libraries \
        && rm /tmp/libraries; \
    else echo "without EFA: INSTALL_EFA=$INSTALL_EFA"; fi

# The environment is /usr/local itself: Enroot sources /etc/profile, which resets PATH, but /usr/local/bin
# stays in it; and an environment does not see the packages in a user's home. The stamp is what preflight compares.
ARG STACK
ARG PRUNE=1
COPY requirements/${STACK}.txt requirements/wandb.txt requirements/prune.sh /tmp/requirements/
# Pruned in the same step: what a later one removes stays in the image. Bytecode is left to the last step, which makes
# it for the modules that training imports: a quarter of all.
RUN python3 -m venv /usr/local \
    && /usr/local/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check \
        -r "/tmp/requirements/$STACK.txt" -r /tmp/requirements/wandb.txt \
    && if [ "$PRUNE" = 1 ]; then bash /tmp/requirements/prune.sh /usr/local/lib/python3*/site-packages; fi \
    && digest=$(sha256sum "/tmp/requirements/$STACK.txt") \
    && printf '%s\n%s\n' "$STACK" "${digest%% *}" > /usr/local/.complete

RUN --mount=type=bind,from=kernels,source=/wheels,target=/wheels \
    for wheel in /wheels/*.whl; do \
        [ ! -e "$wheel" ] || /usr/local/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check --no-deps "$wheel"; \
    done

# Torch 2.2's Triton always uses the rank-0-only cache writer once patched; newer ones use it because of the variable.
COPY patches/ /opt/mamba-train/patches/
RUN /usr/local/bin/python3 /opt/mamba-train/patches/apply.py && rm -rf /tmp/requirements
ENV TRITON_CACHE_MANAGER=triton.runtime.rank0_cache:Rank0CacheManager \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    XDG_CACHE_HOME=/tmp/cache LNAME=mamba-train
# By NVIDIA's variables Enroot's hook and Docker's runtime bring the driver in, whatever the base. /tmp can be
# written even if the root is read-only, as it is under Enroot. Torch's compiler names its cache folder after the user, whom
# the image may not know: Python takes LNAME if neither LOGNAME nor USER is set. The launcher chooses the folder itself.

WORKDIR /opt/mamba-train
COPY . .
# `import mamba_fsdp` and the command mamba-fsdp work from any folder.
RUN /usr/local/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation --editable .
# The image tries what a user does, from text to a model that writes, on this machine's CPU; the first command that fails
# ends the build. On two cores, since a larger machine takes this text as one piece: each of the two processes that
# tokenize must encode two pieces at a time, as with a user's text. What the launcher and many ranks import besides is
# compiled, too.
RUN set -ex; chmod -R a+rX .; taskset --cpu-list --pid 0,1 $$ || echo "not on two cores: others are assigned"; \
    mamba-fsdp doctor; \
    python3 get_dataset.py '/usr/lib/python3.*/*.py' /tmp/try/data --format=text --tokenizer=train:512 --part=0/2 & part=$!; \
    python3 get_dataset.py '/usr/lib/python3.*/*.py' /tmp/try/data --format=text --tokenizer=train:512 --part=1/2; \
    wait "$part"; \
    python3 training.py --dataset_path=/tmp/try/data --save_ckpt_path=/tmp/try/run --batch_size=1 --eval_batches=1 --num_steps=3; \
    python3 training.py --dataset_path=/tmp/try/data --save_ckpt_path=/tmp/try/run --batch_size=1 --eval_batches=1 --num_steps=5; \
    mamba-fsdp generate /tmp/try/run --prompt='def ' --length=5; \
    mamba-fsdp evaluate /tmp/try/run /tmp/try/data/validation --seq_length=256 --limit=8; \
    python3 -c 'import torch.distributed.fsdp, mamba_fsdp.launch.node'; \
    rm -rf /tmp/cache /tmp/try
