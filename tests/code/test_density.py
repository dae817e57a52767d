"""The code stays plain: one thought a line, few packed assignments, few conditions inside expressions."""

import ast
import io
import tokenize
from dataclasses import dataclass

TOKENS_A_LINE = 9.0
TUPLE_SHARE = 0.03  # of the assignments: a, b = x, y
PER_1000_LINES = {"conditionals": 20.0, "walruses": 1.5, "lambdas": 5.0}
MOST_TOKENS = 164_900  # of them 12,400 decide for the launcher, which were 8,500 of bash before
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass
class Density:
    """Counts over some files. A line of code is one on which a token begins that is no comment or docstring."""

    tokens: int = 0
    lines: int = 0
    assignments: int = 0
    tuples: int = 0
    conditionals: int = 0
    walruses: int = 0
    lambdas: int = 0

    def add(self, source: str) -> None:
        lines_with_code = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            is_docstring = token.type == tokenize.STRING and token.string.startswith(
                ('"""', 'r"""')
            )
            if token.type in NOT_CODE or is_docstring:
                continue
            self.tokens += 1
            lines_with_code.add(token.start[0])
        self.lines += len(lines_with_code)
        for node in ast.walk(ast.parse(source)):
            self.count_node(node)

    def count_node(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            self.assignments += 1
            is_target_tuple = isinstance(node.targets[0], ast.Tuple)
            self.tuples += is_target_tuple and isinstance(node.value, ast.Tuple)
        self.conditionals += isinstance(node, ast.IfExp)
        self.walruses += isinstance(node, ast.NamedExpr)
        self.lambdas += isinstance(node, ast.Lambda)


def density_of(folder):
    density = Density()
    for path in sorted(folder.rglob("*.py")):
        density.add(path.read_text())
    return density


def test_code_is_plain(project):
    density = density_of(project / "mamba_fsdp")
    assert density.tokens / density.lines <= TOKENS_A_LINE
    assert density.tuples <= TUPLE_SHARE * density.assignments
    for kind, most in PER_1000_LINES.items():
        assert getattr(density, kind) * 1000 <= most * density.lines, kind


def test_the_library_is_small_enough_to_hold_in_ones_head(project):
    assert density_of(project / "mamba_fsdp").tokens <= MOST_TOKENS
