"""Builds images without a container registry, and runs programs in them like Enroot.

This needs root, buildah and mmdebstrap. The base images are made here: a bare Debian, and a Debian with a CUDA compiler
and the sources of the fused kernels.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.support import cuda_stand_ins
from tests.support.projects import PROJECT

BARE = """\
FROM scratch
ADD base.tar /
COPY ca/ /usr/local/share/ca-certificates/
COPY pip.conf /etc/pip.conf
COPY cuda-libraries/ /opt/cuda-libraries/
RUN update-ca-certificates
"""
PIP_CONF = """\
[global]
cert = /etc/ssl/certs/ca-certificates.crt
find-links = /opt/cuda-libraries
"""
# nvcc and its programs, from the Debian version with CUDA 12, in the layout of NVIDIA's images. The image contains no
# CUDA libraries.
CUDA = """\
FROM localhost/bare
COPY cuda/ /usr/local/cuda/
COPY sources/ /opt/sources/
COPY gitconfig /etc/gitconfig
RUN cd /tmp && sed -n 's/ bookworm main/ trixie non-free/p' /etc/apt/sources.list > /etc/apt/sources.list.d/cuda.list \\
    && apt-get -qq update && apt-get -qq download nvidia-cuda-toolkit \\
    && dpkg-deb -x nvidia-cuda-toolkit_*.deb toolkit && cd /usr/local/cuda && mkdir -p bin nvvm/bin \\
    && mv /tmp/toolkit/usr/lib/nvidia-cuda-toolkit/bin/cicc nvvm/bin/ \\
    && mv /tmp/toolkit/usr/lib/nvidia-cuda-toolkit/libdevice nvvm/ \\
    && mv /tmp/toolkit/usr/lib/nvidia-cuda-toolkit/bin/nvcc /tmp/toolkit/usr/lib/nvidia-cuda-toolkit/bin/crt bin/ \\
    && mv /tmp/toolkit/usr/bin/cudafe++ /tmp/toolkit/usr/bin/ptxas /tmp/toolkit/usr/bin/fatbinary bin/ \\
    && mv /tmp/toolkit/usr/bin/nvlink /tmp/toolkit/usr/bin/bin2c /tmp/toolkit/usr/bin/cuobjdump bin/ \\
    && rm -rf /tmp/* /etc/apt/sources.list.d/cuda.list /var/lib/apt/lists/*
ENV PATH=/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""
NVCC_PROFILE = """\
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
CICC_PATH = $(TOP)/nvvm/bin
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""
# A minimal package that is compiled like causal-conv1d and mamba-ssm: it has its own list of architectures, and the line that
# requirements/build_kernels.sh searches for.
SETUP = """\
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

cc_flag = []
if True:
    cc_flag.append("-gencode")
    cc_flag.append("arch=compute_70,code=sm_70")
    # HACK: The compiler flag -D_GLIBCXX_USE_CXX11_ABI is set to be the same as torch's
nvcc = ["--ptxas-options=-v"] + cc_flag
extension = CUDAExtension("{name}_cuda", ["kernel.cu"], extra_compile_args=dict(cxx=[], nvcc=nvcc))
setup(name="{name}", version="{version}", packages=["{name}"], ext_modules=[extension],
      cmdclass=dict(build_ext=BuildExtension))
"""
KERNEL = """\
#include <Python.h>
__global__ void twice(float* x) {{ x[threadIdx.x] *= 2; }}
static PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}_cuda"}};
PyMODINIT_FUNC PyInit_{name}_cuda() {{ return PyModule_Create(&module); }}
"""


class Builder:
    """Runs buildah with its own storage below `folder`. All builds use `--isolation chroot`, which works inside
    containers and uses the host's network."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, *words, check=True):
        place = ["--root", self.folder / "storage", "--runroot", self.folder / "runroot"]
        place += ["--storage-driver", "overlay"]
        # The build takes longer than all other tests, so it has a higher priority on a busy machine.
        return fetched(
            ["nice", "-n", "-10", "buildah", *place, *words],
            check,
            env={**os.environ, "TMPDIR": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ).stdout

    def make_bare(self):
        """Makes localhost/bare, a Debian with as few packages as possible."""
        base = self.folder / "bare"
        (base / "ca").mkdir(parents=True)
        (base / "Dockerfile").write_text(BARE)
        (base / "pip.conf").write_text(PIP_CONF)
        (base / "ca" / "none").touch()
        certificates_of_proxy = Path("/usr/local/share/ca-certificates").glob("*.crt")
        for certificate in certificates_of_proxy:
            shutil.copy(certificate, base / "ca")
        (base / "cuda-libraries").mkdir()
        cuda_stand_ins.write_wheels(base / "cuda-libraries")
        make = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates"]
        fetched([*make, "bookworm", base / "base.tar"])
        self("bud", "--isolation", "chroot", "-t", "localhost/bare", base)

    def make_cuda(self):
        """Makes localhost/cuda: localhost/bare with a CUDA compiler, in which git clones local sources of the kernels.

        These sources are minimal, because compiling the real ones takes most of an hour on two cores.
        """
        base = self.folder / "cuda"
        base.mkdir()
        (base / "Dockerfile").write_text(CUDA)
        wheels = ["nvidia-cuda-nvcc-cu12==12.4.131", "nvidia-cuda-runtime-cu12==12.4.127"]
        write_sources(base / "sources")
        pip = [sys.executable, *"-m pip download -q --no-deps -d".split()]
        fetched([*pip, base / "wheels", *wheels])
        lay_out_headers(base / "wheels", base / "cuda")
        elsewhere = "".join(
            f"\tinsteadOf = https://github.com/{owner}/\n"
            for owner in ("state-spaces", "Dao-AILab")
        )
        (base / "gitconfig").write_text(f'[url "file:///opt/sources/"]\n{elsewhere}')
        self("bud", "--isolation", "chroot", "-t", "localhost/cuda", base)

    def build(self, context, image):
        """Builds the project in `context` as localhost/`image` on localhost/cuda. Returns the output of buildah."""
        words = ["--isolation", "chroot", "--pull-never"]
        for argument in (
            "BASE_IMAGE=localhost/cuda",
            "DEVEL_IMAGE=localhost/cuda",
            "INSTALL_EFA=0",
        ):
            words += ["--build-arg", argument]
        return self("bud", *words, "-t", f"localhost/{image}", context)

    def run(self, image, script):
        """Runs `script` in localhost/`image` like Enroot, and returns its output.

        The root is read-only, /tmp is a tmpfs, the user is unknown to the image, and the home is not mounted. The
        variables are those of the image, but /etc/profile sets PATH.
        """
        container = self("from", "--pull-never", f"localhost/{image}").strip()
        root = self("mount", container).strip()
        inspected = json.loads(self("inspect", "--type", "image", f"localhost/{image}"))
        enter = (
            f"mount --bind {root} {root}; mount -o remount,bind,ro {root}; mount -t tmpfs tmpfs {root}/tmp; "
            f"mount --rbind /dev {root}/dev; mount -t proc proc {root}/proc; "
            f"exec chroot --userspec=12345:12345 {root} env -i HOME=/nonexistent "
            f"{' '.join(inspected['OCIv1']['config']['Env'])} sh -lec 'cd /opt/mamba-train; '\"$1\""
        )
        try:
            done = subprocess.run(
                ["unshare", "--mount", "--pid", "--fork", "sh", "-ec", enter, "sh", script],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        finally:
            self("rm", container)
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    def remove(self):
        self("rm", "--all", check=False)
        self("rmi", "--all", "--force", check=False)
        subprocess.run(["umount", self.folder / "storage" / "overlay"], stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder, ignore_errors=True)


def fetched(command, check=True, **how):
    """Runs a command, and returns the finished process. With `check`, a command that fails is run up to three times,
    because a build downloads hundreds of files, and a new attempt continues after the steps that succeeded. Raises
    AssertionError if the command fails three times."""
    for _ in range(3):
        done = subprocess.run(command, **how)
        if not check or done.returncode == 0:
            return done
    raise AssertionError(f"{command}: {(done.stdout or '')[-5000:]}")


def kernel_versions(stack):
    """Returns {package: (name of its repository, version)} of the fused kernels of a stack."""
    listed = (PROJECT / "requirements" / f"kernels-{stack}.txt").read_text()
    found = re.findall(
        r"^(\S+) @ https://github\.com/[^/]+/([^/]+)/releases/download/v([^/]+)/",
        listed,
        re.MULTILINE,
    )
    return {package: (repository, version) for package, repository, version in found}


def write_sources(folder):
    """Writes repositories with the names and tags of the kernels' repositories. Each contains a tiny package with the
    right name."""
    for package, (repository, version) in kernel_versions("torch2.2").items():
        name, root = package.replace("-", "_"), folder / repository
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text(f"import torch\nimport {name}_cuda\n")
        (root / "setup.py").write_text(SETUP.format(name=name, version=version))
        (root / "kernel.cu").write_text(KERNEL.format(name=name))
        git = ["git", "-C", root, "-c", "user.name=test", "-c", "user.email=test@localhost"]
        for words in ("init -q", "add .", "commit -qm sources", f"tag v{version}"):
            subprocess.run([*git, *words.split()], check=True)


def lay_out_headers(wheels, cuda):
    """Unpacks the headers and the runtime library from NVIDIA's wheels, in the layout of /usr/local/cuda."""
    (cuda / "bin").mkdir(parents=True)
    (cuda / "bin" / "nvcc.profile").write_text(NVCC_PROFILE)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                match = re.fullmatch(r"nvidia/\w+/(include/.+|lib/libcudart\.so\.\d+)", name)
                if match and not name.endswith("/"):
                    path = cuda / match[1].replace("lib/", "lib64/", 1)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(name))
    (runtime,) = (cuda / "lib64").iterdir()
    (cuda / "lib64" / "libcudart.so").symlink_to(runtime.name)
