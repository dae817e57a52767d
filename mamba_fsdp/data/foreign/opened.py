"""From what a format's module has found to a source: the step that all formats share."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from config.train_config import DataConfig
from mamba_fsdp.data.foreign.index import Wanted, open_index
from mamba_fsdp.data.foreign.indexed import IndexedSource, Rule
from mamba_fsdp.data.foreign.tokens import Known
from mamba_fsdp.errors import UserError

Say = Callable[[str], None]  # prints a line, on rank 0


def opened(path: Path, format: str, root: Path, names: Sequence[str], wanted: Wanted, rule: Rule, known: Known,
           data: DataConfig, say: Say, told: str) -> IndexedSource:
    """The source of the files `names` below `root`, by what the settings say of separators. told: how it is read, in
    words. Raises UserError."""
    if rule.eos < 0:
        rule = replace(rule, eos=known.eos)
    if rule.documents:
        if rule.eos < 0 and not known.inspecting:
            raise UserError(f"{path} ({format}): which token ends its documents is not known; give --eos_token=ID, or "
                            "the tokenizer that made them: --tokenizer=FOLDER")
        rule = replace(rule, bos=known.bos)
        wanted = wanted._replace(added=(rule.bos >= 0) + (rule.eos >= 0), strip=known.strip)
    elif data.reset_at_documents and rule.eos < 0 and not rule.layout:
        raise UserError(f"{path} ({format}): reset_at_documents needs to know which token ends its documents; give "
                        "--eos_token=ID, or the tokenizer that made them: --tokenizer=FOLDER")
    files, place = open_index(root, names, wanted, data.index_dir, say)
    if not sum(file.length for file in files):
        raise UserError(f"{path} ({format}): holds no tokens")
    # What is laid end to end is the same whichever token ends its documents.
    content = [asdict(rule if rule.documents else replace(rule, eos=-1)),
               [(file.dtype, file.mask_dtype, file.length, file.digest) for file in files]]
    identity = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    bos = f"bos {rule.bos} before and " if rule.documents and rule.bos >= 0 else ""
    ends = f", {bos}eos {rule.eos} behind each" if rule.documents and rule.eos >= 0 else ""
    say(f"reads      {path}: {format}, {told}{ends}")
    return IndexedSource(path, format, root, files, place, rule, identity, known.tokenizer)
