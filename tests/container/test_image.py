"""The Dockerfile builds for real, without a container registry, into an image that works the way Enroot runs images.

Needs root, buildah, mmdebstrap (apt-get install --no-install-recommends buildah mmdebstrap), network, 25 GB of disk.
The base is a bare Debian made here; without CUDA in it, the fused kernels are left out, and EFA is by INSTALL_EFA=0.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
BASE_DOCKERFILE = """\
FROM scratch
ADD base.tar /
COPY ca/ /usr/local/share/ca-certificates/
RUN update-ca-certificates && printf '[global]\\ncert = /etc/ssl/certs/ca-certificates.crt\\n' > /etc/pip.conf
"""


class Builder:
    """buildah with a storage of its own below `folder`. Isolation chroot: works inside containers, uses the host's
    network."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, *words, check=True):
        command = [
            "buildah",
            "--root",
            self.folder / "storage",
            "--runroot",
            self.folder / "runroot",
            "--storage-driver",
            "overlay",
            *words,
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert not check or done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    def make_base(self):
        base = self.folder / "base"
        (base / "ca").mkdir(parents=True)
        (base / "Dockerfile").write_text(BASE_DOCKERFILE)
        (base / "ca" / "none").touch()
        for certificate in Path("/usr/local/share/ca-certificates").glob("*.crt"):  # of an inspecting proxy
            shutil.copy(certificate, base / "ca")
        make = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates"]
        subprocess.run([*make, "bookworm", base / "base.tar"], check=True)
        self("bud", "--isolation", "chroot", "-t", "localhost/base", base)

    def build(self, context):
        """Build the project in `context` as localhost/app; returns what buildah says."""
        return self(
            "bud",
            "--isolation",
            "chroot",
            "--layers",
            "--pull-never",
            "--build-arg",
            "BASE_IMAGE=localhost/base",
            "--build-arg",
            "INSTALL_EFA=0",
            "-t",
            "localhost/app",
            context,
        )

    def run(self, script):
        """Run `script` in the image as Enroot would: root read-only, /tmp a tmpfs, a user that the image does not know,
        a home that is not mounted, the image's variables, PATH as /etc/profile leaves it. Returns what it prints."""
        container = self("from", "--pull-never", "localhost/app").strip()
        root = self("mount", container).strip()
        variables = self(
            "inspect", "--type", "image", "--format", "{{range .OCIv1.Config.Env}}{{.}} {{end}}", "localhost/app"
        ).strip()
        enter = (
            f"mount --bind {root} {root}; mount -o remount,bind,ro {root}; mount -t tmpfs tmpfs {root}/tmp; "
            f"mount --rbind /dev {root}/dev; mount -t proc proc {root}/proc; "
            f"exec chroot --userspec=12345:12345 {root} env -i HOME=/nonexistent {variables} "
            "sh -lec 'cd /opt/mamba-train; '\"$1\""
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
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def builder():
    missing = [tool for tool in ("buildah", "mmdebstrap", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid():
        pytest.skip(
            "needs root"
            if os.geteuid()
            else f"needs {' and '.join(missing)}: apt-get install --no-install-recommends buildah mmdebstrap"
        )
    if shutil.disk_usage(tempfile.gettempdir()).free < 25e9:
        pytest.skip(f"needs 25 GB free in {tempfile.gettempdir()}")
    builder = Builder(Path(tempfile.mkdtemp(prefix="mamba-train-image-")))
    try:
        builder.make_base()
        yield builder
    finally:
        builder.remove()


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """A copy of the checkout, and beside it folders that must stay out of the image."""
    folder = tmp_path_factory.mktemp("context")
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(list_files, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)
            (folder / name).chmod(0o600)  # as after `umask 077`: the image must be readable all the same
    for name in ("data/secret", ".venv/secret", "runs/secret", "model.sqsh"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not for the image")
    return folder


@pytest.fixture(scope="module")
def built(builder, context):
    """What the first build said."""
    return builder.build(context)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def test_it_builds_and_its_self_check_passes(built):
    """Every step runs; the last one imports everything, trains a step and prints the versions, with Triton patched."""
    assert "rank-0-only cache writer put in place" in built
    assert "one training step on the CPU" in built
    assert "2.2.2 (CUDA 12.1" in built and "2.2.0 (Rank0CacheManager)" in built
    assert "without EFA" in built and "without the fused CUDA kernels" in built


def test_it_works_where_nothing_but_tmp_can_be_written(builder, built):
    """Under Enroot's conditions python3 is the image's environment, the self-check passes and Triton is still
    patched."""
    said = builder.run(
        "python3 -c 'import sys; print(sys.prefix)'; python3 -m mamba_fsdp selfcheck; "
        "python3 patches/apply.py --check; which torchrun"
    )
    assert (
        said.startswith("/usr/local\n") and "one training step on the CPU" in said and "/usr/local/bin/torchrun" in said
    )


def test_it_holds_what_running_needs_and_nothing_else(builder, built):
    """A C compiler and Python's headers for Triton; no other build tools, no package lists, nothing that
    .dockerignore names."""
    said = builder.run(
        "for tool in gcc git cmake make g++ curl ninja; do command -v $tool || echo no $tool; done; "
        "ls $(python3 -c 'import sysconfig; print(sysconfig.get_paths()[\"include\"])')/Python.h; "
        "ls -A /var/lib/apt/lists /tmp; "
        "find /opt /usr/local -name secret -o -name '*.sqsh' -o -name .git -o -name tests -path '/opt/*'"
    )
    lines = said.splitlines()
    assert lines[0] == "/usr/bin/gcc" and lines[1:7] == [
        f"no {tool}" for tool in ("git", "cmake", "make", "g++", "curl", "ninja")
    ]
    assert lines[7].endswith("/Python.h") and lines[8:] == ["/tmp:", "", "/var/lib/apt/lists:"]


COLD_KERNEL = """
import pathlib, re, subprocess, triton, triton.language as tl

package = pathlib.Path(triton.__file__).parent  # a libcuda that can be linked and loaded, for there is no driver here
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
    """A cold kernel goes all the way to machine code and a compiled launcher with what the image holds; only rank 0
    shares it."""
    script = (
        "export TRITON_CACHE_DIR=/tmp/shared TRITON_LIBCUDA_PATH=/tmp LD_LIBRARY_PATH=/tmp; "
        f"cat > /tmp/kernel.py <<'END'\n{COLD_KERNEL}\nEND\n"
        "for rank in 1 0; do RANK=$rank python3 /tmp/kernel.py; find /tmp/shared -type f 2>/dev/null | wc -l; done"
    )
    said = builder.run(script)
    assert said.count("cubin") == 2, said
    counts = [int(line) for line in said.splitlines() if line.strip().isdecimal()]
    assert counts == [0, 8], said


def test_its_stamp_is_the_one_that_preflight_asks_for(builder, built):
    """The environment in the image counts as made from this checkout's requirements."""
    assert (
        builder.run(
            "python3 -c 'from mamba_fsdp.launch.machine import check_version; check_version(); print(\"equal\")'"
        ).strip()
        == "equal"
    )


def test_a_code_change_repeats_only_the_last_steps(builder, built, context):
    """After an edit of the code all steps up to the copying of the project come from the cache."""
    (context / "training.py").write_text((context / "training.py").read_text() + "\n# edited\n")
    said = builder.build(context)
    steps = [part for part in said.split("STEP ")[1:]]
    repeated = [
        part.split(": ", 1)[1].splitlines()[0]
        for part in steps
        if "Using cache" not in part and not part.split(": ", 1)[1].startswith(("FROM", "ARG"))
    ]
    assert len(steps) > 10 and [words.split(" ", 1)[0] for words in repeated] == ["COPY", "RUN"], repeated
    assert "one training step on the CPU" in said


def test_a_triton_that_the_patch_does_not_fit_ends_the_build(builder, built, context):
    """With a patch for other lines the build fails with the reason."""
    patch = context / "patches" / "triton-2.2.0-rank0-cache.patch"
    patch.write_text(patch.read_text().replace("-__cache_cls", "-__other_cls"))
    said = builder(
        "bud",
        "--isolation",
        "chroot",
        "--layers",
        "--pull-never",
        "--build-arg",
        "BASE_IMAGE=localhost/base",
        "--build-arg",
        "INSTALL_EFA=0",
        "-t",
        "localhost/broken",
        context,
        check=False,
    )
    assert "is not the one the patch expects" in said and "selfcheck" not in said
