"""Checks the manifests of kubernetes/ against the models of Kubeflow's own clients, which drop every unknown field.
Also compares the exit codes in the manifests with the code."""

import re

import pytest
from kubeflow.training.api_client import ApiClient
from kubeflow.training.utils.utils import FakeResponse
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob

from mamba_fsdp.errors import UserError
from tests.kubernetes import manifests


def test_trainer_knows_every_field():
    runtime, job = manifests.read("trainjob.yaml")
    assert TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


@pytest.mark.parametrize(
    "name, patch, model",
    [
        ("pytorchjob.yaml", "", "KubeflowOrgV1PyTorchJob"),
        ("pytorchjob.yaml", "hyperpod.yaml", "KubeflowOrgV1PyTorchJob"),
        ("tokenize.yaml", "", "V1Job"),
    ],
)
def test_the_training_operator_and_kubernetes_know_every_field(name, patch, model):
    client = ApiClient()
    (job,) = manifests.read(name)
    if patch:
        (changes,) = manifests.read(patch)
        job = manifests.patched(job, changes)
    known = client.deserialize(FakeResponse(job), model)
    assert client.sanitize_for_serialization(known) == job


def test_only_a_user_error_fails_a_job():
    (tokenizing,) = manifests.read("tokenize.yaml")
    for job in (manifests.node_job(), tokenizing):
        rules = job["spec"]["podFailurePolicy"]["rules"]
        final = [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob"]
        assert final == [[UserError.exit_code]]


def test_both_kinds_of_job_start_the_same_training():
    command, environment = manifests.node_of_trainjob()
    own = {"RESTART_EXIT_CODE": "129"}
    assert manifests.nodes_of_pytorchjob() == [(command, environment | own)] * 2


def test_the_readme_fills_in_every_variable():
    """Each `envsubst` in the README names exactly the variables of its manifest."""
    text = (manifests.FOLDER / "README.md").read_text()
    found = re.findall(r"envsubst '(.*)' < (\S+) \|", text)
    names_of_files = {path.name for path in manifests.FOLDER.glob("*.yaml")}
    assert {file for _, file in found} == names_of_files - {"hyperpod.yaml"}
    assert set(re.findall(r"[\w-]+\.yaml", text)) == names_of_files
    for names, file in found:
        wanted = set(re.findall(r"\$\{(\w+)\}", (manifests.FOLDER / file).read_text()))
        assert set(re.findall(r"\w+", names)) == wanted, file
