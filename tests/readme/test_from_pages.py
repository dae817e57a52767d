"""docs/from-*.md are true: each is followed word by word on data and files as the other launcher has them, on a CPU."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from config.other_launchers import content, entries
from config.train_config import setting_names
from tests.support.their_files import COMPOSER, DOCS, TRAINER, commands, script

LAUNCHERS = content()["launchers"]


def make_aws(fsx, random):
    datasets = pytest.importorskip("datasets")
    rows = [random.integers(0, 50277, 256).tolist() for _ in range(40)]
    datasets.Dataset.from_dict(
        {"input_ids": rows, "attention_mask": [[1] * 256] * 40, "labels": rows}
    ).save_to_disk(str(fsx / "data/wikicorpus_llama2_7B_tokenized_4k"))
    (fsx / "01.train.sbatch").write_text(script("aws"))


def make_fms(fsx, random):
    import pyarrow as pa
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    schema = pa.schema([pa.field("tokens", pa.uint32())])
    counts = "dataset/filename,documents,tokens\n"
    for name in ("lang=en/dataset=commoncrawl", "lang=en/dataset=arxiv"):
        (fsx / "data" / name).mkdir(parents=True)
        documents = [random.integers(1, 500, random.integers(20, 200)) for _ in range(60)]
        with pa.ipc.new_file(str(fsx / "data" / name / "shard.arrow"), schema) as writer:
            for document in documents:
                writer.write(pa.record_batch([pa.array(document, pa.uint32())], schema))
        counts += f"/{name}/shard.arrow,{len(documents)},{sum(map(len, documents))}\n"
    (fsx / "data/meta").mkdir()
    (fsx / "data/meta/combined_counts.csv").write_text(counts)
    words = Tokenizer(
        models.WordLevel({"<eos>": 0, **{f"w{n}": n for n in range(1, 500)}}, unk_token="<eos>")
    )
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(
        str(fsx / "tokenizer")
    )
    (fsx / "train.sh").write_text(script("fms"))


def make_composer(fsx, random):
    (fsx / "mamba-v1").mkdir()
    for name in ("book", "c"):
        lengths = random.integers(50, 300, 60)
        position = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
        entries = (
            random.integers(0, 65000, position.size).astype(np.int32) | position << 16 | 1 << 30
        )
        path = fsx / f"mamba-v1/{name}.train.gig.npy"
        entries.astype("<i4").tofile(path)
        path.with_name(f"{path.name}.size").write_text(f"{entries.size}\n")
    (fsx / "config.yaml").write_text(COMPOSER.replace("/fsx", str(fsx)))


def make_trainer(fsx, random):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [" ".join(f"word{n}" for n in random.integers(0, 80, 60)) for _ in range(300)]
    pq.write_table(pa.table({"text": texts}), fsx / "train.parquet")
    (fsx / "mamba_130m.yaml").write_text(TRAINER)


MAKE = {"aws": make_aws, "fms": make_fms, "composer": make_composer, "trainer": make_trainer}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_page_is_followed(launcher, project, tmp_path):
    MAKE[launcher](tmp_path, np.random.default_rng(0))
    said, tiny = [], ""
    for command in commands(launcher):
        if command.startswith("TINY="):
            tiny = command
            continue
        command = command.replace("/fsx", str(tmp_path)).replace(".venv/bin/python", sys.executable)
        done = subprocess.run(
            f"{tiny}; {command}",
            shell=True,
            cwd=project,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    first, again = [text for text in said if "model      " in text]
    assert "finished   " in first and ("settings   " in first or launcher in ("aws", "composer"))
    assert "resumes    from" in again and "over       " in again
    (exported,) = [json.loads(file.read_text()) for file in tmp_path.rglob("exported/config.json")]
    assert exported["hidden_size"] == 32


def test_the_pages_name_settings_that_there_are():
    for launcher in LAUNCHERS:
        above = (DOCS / f"from-{launcher}.md").read_text()
        named = set(re.findall(r"`--(\w+)", above)) - {"config", "flag", "resume"}
        unknown = {name for name in named if name not in setting_names() and name not in entries()}
        assert not unknown
