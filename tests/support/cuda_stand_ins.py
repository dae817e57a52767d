"""Makes wheels that replace CUDA's large libraries (2.5 GB) in images that do not run on a GPU.

torch 2.2.2 can be imported with them. Each library has the functions that torch's own libraries call
(cuda_functions.txt), and all of them return an error. pip prefers the versions of these wheels, such as 8.9.2.26+none,
to the versions of the index.
"""

import re
import subprocess
import zipfile
from pathlib import Path

from tests.support.projects import PROJECT

# {package: the libraries in it}
PACKAGES = {
    "cublas": ("libcublas.so.12", "libcublasLt.so.12"),
    "cudnn": ("libcudnn.so.8",),
    "cufft": ("libcufft.so.11",),
    "curand": ("libcurand.so.10",),
    "cusolver": ("libcusolver.so.11",),
    "cusparse": ("libcusparse.so.12",),
    "nvjitlink": ("libnvJitLink.so.12",),
}


def write_wheels(folder):
    """Writes a wheel of each package to `folder`, with the version that requirements/torch2.2.txt pins."""
    of_library = functions()
    requirements = (PROJECT / "requirements/torch2.2.txt").read_text()
    for name, libraries in PACKAGES.items():
        (version,) = re.findall(rf"^nvidia-{name}-cu12==(\S+)", requirements, re.MULTILINE)
        files = {}
        for library in libraries:
            compile_library(folder / library, of_library.get(library, ()))
            files[f"nvidia/{name}/lib/{library}"] = (folder / library).read_bytes()
            (folder / library).unlink()
        write_wheel(folder, f"nvidia_{name}_cu12", f"{version}+none", files)


def functions():
    """Returns {library: its functions that torch's own libraries use}."""
    listed = Path(__file__).with_name("cuda_functions.txt").read_text()
    of_library = {}
    for section in listed.split("[")[1:]:
        library, names = section.split("]")
        of_library[library] = names.split()
    return of_library


def compile_library(path, functions):
    """Compiles a library that exports these functions. As in NVIDIA's libraries, the symbol version of each function is
    the file name of the library."""
    source = path.with_suffix(".c")
    version_script = path.with_suffix(".map")
    definitions = [f"int {name}(void) {{ return 1; }}\n" for name in ("stand_in", *functions)]
    source.write_text("".join(definitions))
    version_script.write_text(f"{path.name} {{ global: *; }};\n")
    options = ["-shared", "-fPIC", f"-Wl,-soname,{path.name},--version-script,{version_script}"]
    subprocess.run(["gcc", *options, "-o", path, source], check=True)
    source.unlink()
    version_script.unlink()


def write_wheel(folder, name, version, files):
    about = f"{name}-{version}.dist-info"
    files = files | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
