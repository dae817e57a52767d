"""Builds the Dockerfile without a container registry, and runs the image like Enroot.

The test needs root, buildah, mmdebstrap (apt-get install --no-install-recommends buildah mmdebstrap), network and 16 GB
of disk. All steps of the Dockerfile run, including the last one, which runs a user's commands from text to a trained
model. These parts are replaced: NVIDIA's base images by a bare Debian, their development image by this Debian with a
CUDA compiler, the sources of the fused kernels by tiny ones (builder.py), and CUDA's large libraries by libraries with
functions that return errors, because nothing calls them without a GPU (cuda_stand_ins.py). INSTALL_EFA=0 leaves out
EFA.

The test takes minutes. It runs only if one of its inputs has changed since the last time, or with CI_ALL=1. The
project's own code is not one of these inputs, because tests/user tests it on the stack of the image.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.builder import PROJECT, Builder, kernel_versions

BUILT = Path(__file__).with_name("built.txt")
HOW = (
    "A successful test_image.py writes this: the digest of what the last real build was made from."
)
SOURCES = ["Dockerfile", ".dockerignore", "requirements", "patches", "pyproject.toml"]


def files_of(*places):
    """Returns the names of the checkout's files that git does not ignore. places: only files in these files or
    folders."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *places]
    return subprocess.check_output(listed, cwd=PROJECT, text=True).split("\0")[:-1]


def digest():
    """Returns a digest of the files that determine how the image is built."""
    found = hashlib.sha256()
    for name in sorted(files_of(*SOURCES)):
        found.update(f"{name}\n".encode() + (PROJECT / name).read_bytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def builder():
    if os.environ.get("CI_ALL") != "1" and BUILT.read_text() == f"{HOW}\n{digest()}\n":
        pytest.skip(
            "the image is made from the same files as in the last real build; CI_ALL=1 builds"
        )
    if os.geteuid():
        pytest.skip("needs root")
    for tool in ("buildah", "mmdebstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}: apt-get install --no-install-recommends {tool}")
    if shutil.disk_usage(tempfile.gettempdir()).free < 16e9:
        pytest.skip(f"needs 16 GB free in {tempfile.gettempdir()}")
    builder = Builder(Path(tempfile.mkdtemp(prefix="mamba-train-image-")))
    try:
        builder.make_bare()
        builder.make_cuda()
        yield builder
    finally:
        builder.remove()


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """Makes a copy of the checkout. The copy also contains files that must not be copied to the image."""
    folder = tmp_path_factory.mktemp("context")
    for name in files_of():
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)
            # The image must be readable for all users, even if the checkout was made with `umask 077`.
            (folder / name).chmod(0o600)
    for name in ("data/secret", ".venv/secret", "runs/secret", "model.sqsh"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not for the image")
    return folder


@pytest.fixture(scope="module")
def built(builder, context, request):
    """Builds the image, and provides the output of the build. If no test finds an error in the image, the build is
    recorded as successful."""
    failed = request.session.testsfailed
    made_from = digest()
    yield builder.build(context, "app")
    if request.session.testsfailed == failed:
        BUILT.write_text(f"{HOW}\n{made_from}\n")


pytestmark = [pytest.mark.slow, pytest.mark.timeout(9000)]


def test_it_builds_and_its_self_check_passes(built):
    """Every step of the Dockerfile runs, and Triton is patched. The last step prints the versions and runs the commands
    of a user."""
    assert "rank-0-only cache writer put in place" in built
    assert "ok   operators" in built
    assert "torch 2.2.2" in built
    assert "is finished; to complete /tmp/try/data, these parts have to finish: " in built, (
        "two workers"
    )
    assert "resumes    from /tmp/try/run/checkpoints/step_00000003, step 3" in built
    assert "finished   5 steps" in built
    assert "5 tokens in " in built, "generate"
    assert "nats per token" in built, "evaluate"
    assert "without EFA" in built
    before, after = map(int, re.search(r"pruned from (\d+) MB to (\d+) MB", built).groups())
    assert after < 0.85 * before


def test_the_fused_kernels_hold_code_for_each_gpu_that_is_wanted(builder, built):
    """The fused kernels have the pinned versions. They contain code for exactly the wanted GPUs, although their
    packages have their own lists of GPUs."""
    output = builder.run(
        "app",
        "for library in /usr/local/lib/python3*/site-packages/*_cuda.*.so; do "
        "echo $(basename $library .so) "
        "$(/usr/local/cuda/bin/cuobjdump --list-elf $library | grep -o 'sm_[0-9]\\+' | sort -u); done",
    )
    code = {line.split(".")[0]: line.split()[1:] for line in output.splitlines()}
    wanted = ["sm_80", "sm_86", "sm_89", "sm_90"]
    assert len(code) == 2 and "causal_conv1d_cuda" in code
    assert all(each == wanted for each in code.values())
    for package, (_, version) in kernel_versions("torch2.2").items():
        assert f"{package} {version}" in built, f"doctor: {package} {version}"


def test_it_works_where_nothing_but_tmp_can_be_written(builder, built):
    """Under Enroot's conditions, python3 is the Python of the image's environment, and this environment matches the
    requirements of the checkout. The doctor passes, and Triton is patched."""
    output = builder.run(
        "app",
        "python3 -c 'import sys; print(sys.prefix); from mamba_fsdp.launch import machine; machine.check_version()'; "
        "python3 -m mamba_fsdp doctor; "
        "python3 patches/apply.py --check; which torchrun; echo $NVIDIA_VISIBLE_DEVICES $NVIDIA_DRIVER_CAPABILITIES",
    )
    assert (
        output.startswith("/usr/local\n")
        and "ok   operators" in output
        and "/usr/local/bin/torchrun" in output
    )
    assert output.endswith("all compute,utility\n"), "Enroot's hook needs these variables"


def test_it_only_contains_files_that_are_needed_to_run(builder, built):
    """The image contains a C compiler and Python's headers for Triton, but no other build tools, no package lists, and
    no files that .dockerignore excludes."""
    output = builder.run(
        "app",
        "for tool in gcc git cmake make g++ curl ninja; do command -v $tool || echo no $tool; done; "
        "ls $(python3 -c 'import sysconfig; print(sysconfig.get_paths()[\"include\"])')/Python.h; "
        "ls -A /var/lib/apt/lists /tmp; ls -d /var/cache/apt/archives/*.deb /usr/share/locale 2>/dev/null || true; "
        "find /opt/mamba-train /usr/local "
        "-name secret -o -name '*.sqsh' -o -name .git -o -name tests -path '/opt/mamba-train/*'",
    )
    lines = output.splitlines()
    assert lines[0] == "/usr/bin/gcc" and lines[1:7] == [
        f"no {tool}" for tool in ("git", "cmake", "make", "g++", "curl", "ninja")
    ]
    assert lines[7].endswith("/Python.h") and lines[8:] == ["/tmp:", "", "/var/lib/apt/lists:"]
    bytecode = builder.run(
        "app", "find /usr/local/lib -name '*.pyc' -printf '%s %f\\n'"
    ).splitlines()
    assert any("fully_sharded" in line for line in bytecode), "training's modules are compiled"
    assert sum(int(line.split()[0]) for line in bytecode) < 90e6, "and the others are not"


COLD_KERNEL = """
import pathlib, re, subprocess, triton, triton.language as tl

package = pathlib.Path(triton.__file__).parent  # a libcuda that can be linked and loaded, because this machine has no driver
used = (package / 'runtime/backends/cuda.c').read_text() + (package / 'compiler/make_launcher.py').read_text()
functions = set(re.findall(r'\\b(cu[A-Z]\\w+)\\s*\\(', used))
pathlib.Path('/tmp/stub.c').write_text(''.join(f'int {name}(void) {{ return 999; }}' for name in functions))
subprocess.check_call('gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 stub.c', shell=True, cwd='/tmp')
subprocess.check_call('ln -sf libcuda.so.1 libcuda.so', shell=True, cwd='/tmp')

@triton.jit
def double(x, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(x + i, 2 * tl.load(x + i))

print('stages:', *triton.compile(double, signature={0: '*fp32'}, constants={1: 64}, cc=90, device_type='cuda').asm)
"""


def test_triton_compiles_in_it(builder, built):
    """The tools in the image suffice to compile a new kernel to machine code, and to compile its launcher. Only rank 0
    writes the results to the shared cache."""
    script = (
        "export TRITON_CACHE_DIR=/tmp/shared TRITON_LIBCUDA_PATH=/tmp LD_LIBRARY_PATH=/tmp; "
        f"cat > /tmp/kernel.py <<'END'\n{COLD_KERNEL}\nEND\n"
        "for rank in 1 0; do RANK=$rank python3 /tmp/kernel.py; find /tmp/shared -type f 2>/dev/null | wc -l; done"
    )
    output = builder.run("app", script)
    assert output.count("cubin") == 2, output
    counts = [int(line) for line in output.splitlines() if line.strip().isdecimal()]
    assert counts == [0, 8], output
