"""python -m mamba_fsdp settings [NAME] -- [SETTING=VALUE words of a training command]
python -m mamba_fsdp settings --from=aws|fms|composer|trainer FILE

Print the resolved value of setting NAME, or all settings as YAML, for the training command whose words follow `--`.
Exits with 2 and one line when the command has a mistake.

  python -m mamba_fsdp settings save_ckpt_path -- --config=config/demo.yaml

With --from, print as YAML for --config what FILE of another launcher says: a YAML file, or a script with its command
line. What it leaves to that launcher's defaults is written too; what has no counterpart here is a comment.

  python -m mamba_fsdp settings --from=composer their.yaml > mine.yaml
"""

from collections.abc import Sequence

from config import resolve
from config.bring import brought
from config.fields import near_name, shown
from mamba_fsdp import command_line
from mamba_fsdp.errors import UserError


def main(name: str = "", after_dashes: Sequence[str] | None = None, **options: object) -> None:
    launcher = options.pop("from", None)
    if options:
        raise UserError(f"--{next(iter(options))}: there is no such option; see --help")
    if launcher:
        print(brought(str(launcher), name), end="")
        return
    stray, given = command_line.split(after_dashes or [])
    settings, _ = resolve.resolve_settings(given, given.pop("config", None), stray)
    if not name:
        print(resolve.as_yaml(settings), end="")
        return
    if name not in resolve.all_settings():
        hint = near_name(name, resolve.all_settings(), "training.py --help lists them")
        raise UserError(f"{name}: there is no such setting; {hint}")
    section, _ = resolve.all_settings()[name]
    print(shown(resolve.as_dict(settings)[section][name]))
