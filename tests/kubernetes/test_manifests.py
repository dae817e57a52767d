"""The manifests of kubernetes/ against the models of Kubeflow's own clients, which drop every field that they don't know;
and what they say of exit codes against the code."""

import re

import pytest
from kubeflow.training.api_client import ApiClient
from kubeflow.training.utils.utils import FakeResponse
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob

from mamba_fsdp.errors import Accident, StorageError, UserError
from tests.kubernetes import manifests

HYPERPOD = "sagemaker.amazonaws.com"


def test_trainer_knows_every_field():
    runtime, job = manifests.read("trainjob.yaml")
    assert TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert job["spec"]["runtimeRef"] == {
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }


@pytest.mark.parametrize(
    "name, model", [("pytorchjob.yaml", "KubeflowOrgV1PyTorchJob"), ("tokenize.yaml", "V1Job")]
)
def test_the_training_operator_and_kubernetes_know_every_field(name, model):
    client = ApiClient()
    (job,) = manifests.read(name)
    known = client.deserialize(FakeResponse(job), model)
    assert client.sanitize_for_serialization(known) == job


def test_hyperpod_is_a_patch_of_the_pytorchjob():
    """What AWS asks for its auto-resume; all else stays."""
    (job,) = manifests.read("pytorchjob.yaml")
    (patch,) = manifests.read("hyperpod.yaml")
    job = manifests.patched(job, patch)
    client = ApiClient()
    known = client.deserialize(FakeResponse(job), "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(known) == job
    assert job["metadata"]["name"] == "mamba-train"
    assert job["metadata"]["namespace"] == "kubeflow"
    assert {name.partition("/")[0] for name in job["metadata"]["annotations"]} == {HYPERPOD}
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        assert replica["restartPolicy"] == "OnFailure" and pod["containers"]
        assert pod["nodeSelector"] == {f"{HYPERPOD}/node-health-status": "Schedulable"}


def test_trainer_finds_the_node():
    """It looks for this label, and for a container of this name."""
    job = manifests.node_job()
    assert job["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [each["name"] for each in job["spec"]["template"]["spec"]["containers"]] == ["node"]


def test_a_mistake_fails_the_job_and_all_else_starts_again():
    spec = manifests.node_job()["spec"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["operator"] == "In"
    assert rule["onExitCodes"]["values"] == [UserError.exit_code]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "else Kubernetes refuses the rule"
    runtime, _ = manifests.read("trainjob.yaml")
    policy = runtime["spec"]["template"]["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert policy["maxRestarts"] > 0
    (job,) = manifests.read("pytorchjob.yaml")
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert replica["restartPolicy"] == "ExitCode"
    assert {Accident.exit_code, StorageError.exit_code} == {1, 74}, "which it would take as final"


def test_a_mistake_fails_the_tokenising_and_all_else_gets_a_new_pod():
    (job,) = manifests.read("tokenize.yaml")
    pod = job["spec"]["template"]["spec"]
    mistake, disruption = job["spec"]["podFailurePolicy"]["rules"]
    assert mistake["action"] == "FailJob" and mistake["onExitCodes"] == {
        "containerName": pod["containers"][0]["name"],
        "operator": "In",
        "values": [UserError.exit_code],
    }
    assert disruption["action"] == "Ignore" and "onExitCodes" not in disruption
    assert pod["restartPolicy"] == "Never", "else Kubernetes refuses the rule"


def test_both_kinds_of_job_start_the_same_training():
    command, environment = manifests.node_of_trainjob()
    own = {"RESTART_EXIT_CODE": "129"}
    assert manifests.nodes_of_pytorchjob() == [(command, environment | own)] * 2


def test_the_readme_fills_in_every_variable():
    """Each `envsubst` names just those of its file, which are set before."""
    text = (manifests.FOLDER / "README.md").read_text()
    found = re.findall(r"envsubst '(.*)' < (\S+) \|", text)
    names_of_files = {path.name for path in manifests.FOLDER.glob("*.yaml")}
    assert {file for _, file in found} == names_of_files - {"hyperpod.yaml"}
    assert set(re.findall(r"[\w-]+\.yaml", text)) == names_of_files
    for names, file in found:
        wanted = set(re.findall(r"\$\{(\w+)\}", (manifests.FOLDER / file).read_text()))
        assert set(re.findall(r"\w+", names)) == wanted, file
        before = text[: text.index(f"< {file}")]
        assert all(re.search(rf"export .*\b{name}=", before) for name in wanted), file


def test_the_readme_names_objects_of_the_manifests():
    """In commands, and the first pod of a PyTorchJob."""
    names, claims = set(), set()
    for file in ("trainjob.yaml", "pytorchjob.yaml", "tokenize.yaml"):
        names |= {found["metadata"]["name"] for found in manifests.read(file)}
        claims |= set(re.findall("claimName: (.*)", (manifests.FOLDER / file).read_text()))
    text = (manifests.FOLDER / "README.md").read_text()
    named = re.findall(r"^ {4}kubectl .*[ =/](mamba-\S+)", text, re.MULTILINE)
    assert len(named) > 10
    assert {name.removesuffix("-master-0") for name in named} <= names
    assert set(re.findall(r"kubectl get pvc ([\w-]+)", text)) == claims
