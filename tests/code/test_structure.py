"""Tests the structure of the library: the floors of docs/architecture.md, imports without cycles, the size of each
folder, and the use of files. A file imports only from its own folder and from floors below it."""

import ast
import collections
import re
import tokenize
from pathlib import Path

import pytest

# {folder of the library: its limit of tokens, without comments and docstrings}. A commit with a feature that needs more tokens
# raises the limit of its folder, and its message gives the reason. A commit that needs fewer tokens lowers the limit.
MAX_TOKENS = {
    ".": 5_333,
    "checkpoint": 9_019,
    "data": 9_827,
    "importing": 18_295,
    "inference": 4_228,
    "interop": 12_401,
    "launch": 23_187,
    "model": 11_173,
    "ops": 36_863,
    "parallel": 7_060,
    "planning": 7_012,
    "reporting": 3_935,
    "run": 4_558,
    "settings": 9_824,
    "storage": 3_177,
    "trainer": 23_000,
    "verbs": 8_563,
}
NOT_CODE = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}


@pytest.fixture(scope="module")
def files(project):
    """Returns {path in the project: syntax tree} of the Python files, without tests."""
    places = ("*.py", "benchmarks/*.py", "mamba_fsdp/**/*.py")
    paths = [path for place in places for path in project.glob(place)]
    return {path.relative_to(project): ast.parse(path.read_text()) for path in paths}


def floors(project):
    """Returns {file or folder: its floor} from the table in docs/architecture.md, whose last row is floor 0."""
    rows = re.findall(
        r"^\| [a-z]+ \| (`.*`) \|$", (project / "docs/architecture.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 5
    return {
        place.rstrip("/"): floor
        for floor, row in enumerate(reversed(rows))
        for place in re.findall(r"`(.+?)`", row)
    }


def place_of(path, known):
    """Returns the file or folder of the table that contains a file; None for the package's __init__.py."""
    places = [str(place) for place in (path, *path.parents) if str(place) in known]
    assert places or str(path) == "mamba_fsdp/__init__.py", (
        f"docs/architecture.md has no floor for {path}"
    )
    return places[0] if places else None


def nodes_that_run(tree):
    """Yields all nodes of a tree except those below `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING":
            yield node
            yield from nodes_that_run(node)


def imported(path, nodes, files):
    """Yields the files of the project that the nodes of a file's syntax tree import."""
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        for name in names:
            stem = Path(*name.split("."))
            found = [
                file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file in files
            ]
            yield from found


def test_imports_run_down_the_floors(project, files):
    """A file imports only from its own folder and from lower floors, also in functions and for types only."""
    known = floors(project)
    wrong = []
    for path, tree in files.items():
        for other in set(imported(path, ast.walk(tree), files)):
            here, there = place_of(path, known), place_of(other, known)
            if here and there and here != there and known[there] >= known[here]:
                wrong.append(f"{path} imports {other}")
    assert not wrong


def test_imports_have_no_cycles(files):
    """Imports between files have no cycles, except imports for types only."""
    graph = {
        path: set(imported(path, nodes_that_run(tree), files)) - {path}
        for path, tree in files.items()
    }
    order, on_the_way = set(), []

    def visit(path):
        assert path not in on_the_way, (
            f"a circle: {' -> '.join(map(str, on_the_way[on_the_way.index(path) :] + [path]))}"
        )
        if path not in order:
            on_the_way.append(path)
            for other in graph[path]:
                visit(other)
            order.add(on_the_way.pop())

    for path in graph:
        visit(path)


def test_the_files_in_the_architecture_exist(project):
    """Each path in docs/architecture.md exists in the project folder or in the library."""
    text = (project / "docs/architecture.md").read_text()
    named = {
        name
        for name in re.findall(r"`([a-z0-9_./]+)`", text)
        if "/" in name or name.endswith((".py", ".toml"))
    }
    missing = [
        name
        for name in named
        if not any((root / name).exists() for root in (project, project / "mamba_fsdp"))
    ]
    assert len(named) > 30 and not missing


def test_imported_modules_of_the_project_exist(project, files):
    """Each module of the library and of the benchmarks that a file imports exists. No test runs all benchmarks."""
    for path, tree in files.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            place = project.joinpath(*node.module.split("."))
            if node.module.split(".")[0] in ("benchmarks", "mamba_fsdp"):
                is_there = place.is_dir() or place.with_suffix(".py").exists()
                assert is_there, f"{path} imports {node.module}"


def count_tokens(path):
    """Returns the number of tokens of a file, without comments and docstrings."""
    count = 0
    with path.open() as file:
        for token in tokenize.generate_tokens(file.readline):
            is_docstring = token.string.startswith(('"""', 'r"""'))
            count += tokenize.tok_name[token.type] not in NOT_CODE and not is_docstring
    return count


def test_no_folder_of_the_library_grows_by_accident(project):
    library = project / "mamba_fsdp"
    counts = collections.Counter()
    for path in library.rglob("*.py"):
        first, *rest = path.relative_to(library).parts
        counts[first if rest else "."] += count_tokens(path)
    assert counts.keys() == MAX_TOKENS.keys()
    above = {folder: count for folder, count in counts.items() if count > MAX_TOKENS[folder]}
    assert above == {}, "these folders have more tokens than MAX_TOKENS allows"


# Calls that handle neither transient errors of a disk nor pipes in place of files, in contrast to storage/.
FILE_CALLS = re.compile(
    r"open|io\.open|os\.path\.(exists|isfile|isdir)|shutil\.copy\w*"
    r"|.*\.(exists|is_file|is_dir|read_text|read_bytes|write_text|write_bytes)"
)
# {file or folder that uses these calls nevertheless: the reason}
MAY_USE_FILES = {
    "benchmarks": "is not part of the library",
    "mamba_fsdp/launch": "runs on the cluster's own Python, or on a node's own disk",
    "mamba_fsdp/storage": "handles the errors",
    "mamba_fsdp/errors.py": "is imported by storage/",
    "mamba_fsdp/this_process.py": "is imported by storage/",
    "mamba_fsdp/reporting/console.py": "opens the null device",
    "mamba_fsdp/run/node_record.py": "runs on the cluster's own Python too",
    "mamba_fsdp/run/names.py": "runs on the cluster's own Python too",
    "mamba_fsdp/run/lease.py": "makes its file, or finds that another has made it",
    "mamba_fsdp/run/records.py": "appends to a file, and retries by itself",
    "mamba_fsdp/checkpoint/files.py": "reads a file back while it is written; the caller retries",
}


def test_files_are_used_through_storage(files):
    """The library uses files only through storage/, with the exceptions in MAY_USE_FILES. A single EIO of a file server
    would otherwise end a run, and a pipe in place of a file would block the run."""
    wrong = []
    for path, tree in files.items():
        places = {str(place) for place in (path, *path.parents)}
        if not path.is_relative_to("mamba_fsdp") or places & MAY_USE_FILES.keys():
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and FILE_CALLS.fullmatch(ast.unparse(node.func)):
                wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)[:60]}")
    assert not wrong
