"""Reads the manifests of kubernetes/ after the substitutions in their README, and the commands of their containers."""

import re
from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "kubernetes"
VARIABLES = {
    "IMAGE_URI": "registry/mamba-train:1",
    "NUM_NODES": "2",
    "NUM_WORKERS": "1",
    "GPU_PER_NODE": "8",
    "EFA_PER_NODE": "32",
    "PARTS": "4",
}


def read(name):
    """Returns the objects of a manifest."""
    text = (FOLDER / name).read_text()
    return list(yaml.safe_load_all(re.sub(r"\$\{(\w+)\}", lambda word: VARIABLES[word[1]], text)))


def patched(document, patch):
    """Returns the result of `kubectl patch --type=merge`."""
    if not isinstance(patch, dict):
        return patch
    changes = {key: patched(document.get(key, {}), value) for key, value in patch.items()}
    return document | changes


def expanded(words, environment):
    """Expands $(NAME) in the command of a container like Kubernetes."""
    return [re.sub(r"\$\((\w+)\)", lambda word: environment[word[1]], word) for word in words]


def node_job():
    """Returns the template of the Job that runs the nodes of a TrainJob."""
    runtime, _ = read("trainjob.yaml")
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]


def node_of_trainjob():
    """Returns (command, environment) of a node: those of the runtime, with the changes of the TrainJob."""
    (container,) = node_job()["spec"]["template"]["spec"]["containers"]
    trainer = read("trainjob.yaml")[1]["spec"]["trainer"]
    variables = container["env"] + trainer["env"]
    environment = {variable["name"]: variable["value"] for variable in variables}
    return container["command"] + trainer["args"], environment


def nodes_of_pytorchjob():
    """Returns (command, environment) of the master and of the workers."""
    (job,) = read("pytorchjob.yaml")
    found = []
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        found.append((container["command"] + container["args"], environment))
    return found
