"""sample_prompts: what the model writes at each validation, and that training does not feel it."""

import json

import pytest
import torch

from config.model_config import ModelConfig
from config.train_config import ParallelConfig
from mamba_fsdp.errors import UserError
from mamba_fsdp.model.generate import generate
from mamba_fsdp.model.init import initial_part
from mamba_fsdp.model.lm import MambaLM
from mamba_fsdp.model.spec import parameters
from mamba_fsdp.parallel.model import fill_parts
from mamba_fsdp.parallel.parallelize import parallelize
from mamba_fsdp.parallel.world import World
from mamba_fsdp.train.metrics_logger import MetricsLogger
from mamba_fsdp.train.sampling import continue_prompts

PROMPTS = [[5, 6, 7, 8, 9], [3], [1, 2]]


def filled(world, strategy):
    config = ModelConfig(
        d_model=16,
        n_layer=2,
        vocab_size=61,
        d_state=4,
        layers="mamba1,attention",
        n_head=2,
        n_kv_head=2,
    )
    with torch.device("meta"):
        model = MambaLM(config)
    parallel, spec = (
        parallelize(
            model,
            ParallelConfig(sharding_strategy=strategy),
            world=world,
            compute_dtype=torch.float32,
        ),
        parameters(config),
    )
    fill_parts(
        parallel.shards(),
        lambda name, start, stop: initial_part(name, spec[name], 3, start, stop) * 20,
    )
    return parallel


def texts_of(world, strategy):
    parallel = filled(world, strategy)
    return continue_prompts(parallel, PROMPTS, length=7, seed=1), parallel.module.training


def test_what_is_drawn_is_what_generate_draws():
    """Of one prompt; and others beside it, shorter and longer, are read as if they were alone."""
    parallel = filled(World.alone(), "none")
    for prompt in PROMPTS:
        expected = generate(
            parallel.model,
            torch.tensor([prompt]),
            length=7,
            temperature=0.8,
            generator=torch.Generator().manual_seed(1),
        )
        assert continue_prompts(parallel, [prompt], length=7, seed=1) == [
            [int(token) for token in expected]
        ]
    state = torch.get_rng_state()
    together = continue_prompts(parallel, PROMPTS, length=7, seed=1)
    assert torch.equal(torch.get_rng_state(), state) and parallel.module.training
    assert together[0] != together[1] and together != continue_prompts(
        parallel, PROMPTS, length=7, seed=2
    )
    for row, (prompt, text) in enumerate(
        zip(PROMPTS, together)
    ):  # each token has a chance behind what is before it
        with torch.no_grad():
            chance = parallel.model(torch.tensor([prompt + text]))[0].softmax(-1)
        assert all(chance[len(prompt) + at - 1, token] > 1e-4 for at, token in enumerate(text)), row


@pytest.mark.slow
def test_a_run_writes_samples_at_each_validation_and_trains_as_without(
    train, tmp_path, corpus, metrics_of, weights_of, monkeypatch
):
    given = {"dataset_path": corpus / "words/data"}
    train(tmp_path / "without", **given)
    train(tmp_path / "with", sample_prompts=corpus / "prompts", sample_length=5, **given)
    assert metrics_of(tmp_path / "with") == metrics_of(tmp_path / "without")
    weights = weights_of(tmp_path / "without")
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in weights_of(tmp_path / "with").items()
    )
    lines = [
        json.loads(line) for line in (tmp_path / "with/generated.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (0, 3, 6) for prompt in ("a b\nc", "h")
    ]
    assert all(set(line["text"].split()) <= set("?abcdefgh") for line in lines) and any(
        line["text"] for line in lines
    )
    # A run that is cut and resumes writes the same, each once.
    sampled = MetricsLogger.sampled
    with monkeypatch.context() as patch:
        patch.setattr(
            MetricsLogger,
            "sampled",
            lambda recorder, step, *texts: [
                step == 3 and (tmp_path / "cut/STOP").touch(),
                sampled(recorder, step, *texts),
            ],
        )
        train(tmp_path / "cut", sample_prompts=corpus / "prompts", sample_length=5, **given)
    assert json.loads((tmp_path / "cut/status.json").read_text())["status"] == "stopped"
    train(tmp_path / "cut", sample_prompts=corpus / "prompts", sample_length=5, **given)
    assert (tmp_path / "cut/generated.jsonl").read_text() == (
        tmp_path / "with/generated.jsonl"
    ).read_text()


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "prompts: No such file or directory"),
        ("", "holds 0 prompts; write one a line"),
        ("\n".join(map(str, range(65))), "holds 65 prompts"),
        (b"caf\xe9\n", "can't decode byte 0xe9"),
    ],
)
def test_prompts_that_do_not_serve_are_refused_before_anything_is_trained(
    train, tmp_path, corpus, text, message
):
    if text is not None:
        (tmp_path / "prompts").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(
        UserError, match=f"sample_prompts {tmp_path}/prompts: .*{message}|{message}"
    ):
        train(
            tmp_path / "run",
            dataset_path=corpus / "words/data",
            sample_prompts=tmp_path / "prompts",
        )
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_data_without_a_tokenizer_has_no_words_for_prompts(train, tmp_path, corpus):
    with pytest.raises(UserError, match="sample_prompts .*tokenizer"):
        train(tmp_path / "run", sample_prompts=corpus / "prompts")
