"""benchmarks/gpu_setup.sh installs the kernels that were carried to a machine without network."""

import os
import subprocess

PYTHON = """#!/bin/sh
# Stands in for `python -m pip`: makes a wheel of nothing, says what a compiler says, names what it should install.
for last; do :; done
case " $* " in
*" wheel "*)
    while [ "$1" != --wheel-dir ]; do shift; done
    touch "$2/${last##*/}.whl" && echo "Compiling for 'sm_90'" ;;
*) for last; do case $last in *.whl) echo "${last##*/}" >>"$0.installed" ;; esac; done ;;
esac
"""


def test_setup_installs_what_was_carried_and_the_kernels_for_this_gpu(project, tmp_path):
    for package in ("causal_conv1d-1.7.0", "mamba_ssm-2.3.1"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "setup.py").write_text(
            "if True:\n    # HACK: The compiler flag\n    pass\n"
        )
        subprocess.run(["tar", "-czf", f"{package}.tar.gz", package], cwd=tmp_path, check=True)
    (tmp_path / "einops.whl").touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.symlink_to("/bin/true")
    command = [project / "benchmarks/gpu_setup.sh", tmp_path, tmp_path / "target"]
    environment = os.environ | {"PYTHON": str(python), "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "python.installed").read_text().split() == [
        "einops.whl",
        "causal-conv1d.whl",
        "mamba-ssm.whl",
    ]
