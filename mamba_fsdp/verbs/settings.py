"""python -m mamba_fsdp settings --from=aws|fms|composer|trainer FILE

Print as YAML for --config what FILE of another launcher says: a YAML file, or a script with its command line. What it
leaves to that launcher's defaults is written too; what has no counterpart here is a comment.

  python -m mamba_fsdp settings --from=composer their.yaml > mine.yaml
"""

from config.bring import brought
from mamba_fsdp.errors import UserError


def main(file: str, **options: object) -> None:
    launcher = options.pop("from", "")
    if options or not launcher:
        raise UserError(
            f"--{next(iter(options), 'from')}: write settings --from=aws|fms|composer|trainer FILE"
        )
    print(brought(str(launcher), file), end="")
