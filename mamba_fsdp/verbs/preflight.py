"""python -m mamba_fsdp preflight report FOLDER -- [settings of the training command]
python -m mamba_fsdp preflight judge FOLDER NODE ...

Are the nodes of a job fit for this training? 1.train.sbatch runs `report` on every node, in the training's own
environment, then `judge` once, which prints what each NODE is and what is wrong with it. FOLDER is a fresh folder in
the run folder with a file `token`. Exit codes of judge: 0, 2 for what you have to mend, 1 for trouble that may pass.
"""

from collections.abc import Sequence
from pathlib import Path

from config.resolve import resolve_settings
from mamba_fsdp import command_line
from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.launch import preflight


def main(action: str, folder: str, *nodes: str, after_dashes: Sequence[str] | None = None) -> int:
    if action == "judge" and nodes:
        return preflight.judge(Path(folder), nodes)
    if action != "report" or nodes:
        raise UserError("preflight: write `report FOLDER -- SETTINGS` or `judge FOLDER NODE ...`")
    stray, given = command_line.split(after_dashes or [])
    settings, explicit = resolve_settings(given, given.pop("config", None), stray)
    mistakes = []
    if settings.checkpoint.init_from or settings.checkpoint.load_ckpt_path:
        from mamba_fsdp.verbs.loading import starting_weights

        try:
            starting_weights(settings, explicit)  # whose shape the model has
        except StorageError:
            raise  # trouble that may pass: no answer, for the judge
        except UserError as error:
            mistakes.append(str(error))
    preflight.report(Path(folder), settings, mistakes)
    return 0
