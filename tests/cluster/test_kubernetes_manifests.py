"""Test the manifests of docs/kubernetes.md: the fields exist, and the rules act as described."""

import re
from pathlib import Path

import pytest
import yaml

from deferred import Deferred
from holdfast.cluster.kubernetes_pod import CLASSES
from holdfast.recover.agent.rendezvous import meeting_of, node_name
from holdfast.testing.kubernetes_policies import (
    after_job_failure,
    after_pod_failure,
    jobs_of,
    pod_of,
    variables_of,
)

PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
DOCUMENTS = [one for block in BLOCKS for one in yaml.safe_load_all(block)]

JOBSET_SPEC = {
    "failurePolicy": {
        "maxRestarts": "int",
        "restartStrategy": "str",
        "rules": [
            {
                "name": "str",
                "action": "str",
                "onJobFailureReasons": ["str"],
                "onJobFailureMessagePatterns": ["str"],
                "targetReplicatedJobs": ["str"],
            }
        ],
    },
    "network": {"enableDNSHostnames": "bool", "subdomain": "str"},
    "replicatedJobs": [{"name": "str", "replicas": "int", "template": "V1JobTemplateSpec"}],
    "successPolicy": {"operator": "str", "targetReplicatedJobs": ["str"]},
    "suspend": "bool",
}
"""The fields of jobset.x-k8s.io/v1alpha2; a string names a type or a model of the client."""

client = Deferred("kubernetes.client")
SPECS = {
    "JobSet": JOBSET_SPEC,
    "ClusterTrainingRuntime": {
        "mlPolicy": {"numNodes": "int", "torch": {"numProcPerNode": "int"}},
        "template": {"metadata": "V1ObjectMeta", "spec": JOBSET_SPEC},
    },
    "TrainJob": {
        "runtimeRef": {"name": "str", "apiGroup": "str", "kind": "str"},
        "suspend": "bool",
        "trainer": {
            "image": "str",
            "command": ["str"],
            "args": ["str"],
            "env": "List[V1EnvVar]",
            "numNodes": "int",
            "numProcPerNode": "int",
            "resourcesPerNode": "V1ResourceRequirements",
        },
    },
}


def check(found, schema, where):
    """Compare a part of a manifest with its schema: a dictionary, a list or a type's name."""
    if isinstance(schema, dict):
        assert isinstance(found, dict), where
        unknown = set(found) - set(schema)
        assert not unknown, f"{where} has no field {unknown}"
        for key, value in found.items():
            check(value, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(found, list), where
        for one in found:
            check(one, schema[0], f"{where}[]")
    elif (inner := re.fullmatch(r"List\[(.*)\]", schema)) is not None:
        check(found, [inner[1]], where)
    elif (model := getattr(client, schema, None)) is not None:
        names = model.attribute_map
        check(found, {names[name]: kind for name, kind in model.openapi_types.items()}, where)
    elif schema.startswith("Dict["):
        assert isinstance(found, dict), where
    else:
        assert type(found).__name__ == schema or schema == "object", f"{where}: {found!r}"


@pytest.mark.parametrize(
    "document", [one for one in DOCUMENTS if "kind" in one], ids=lambda one: one["kind"]
)
def test_every_field_exists(document):
    kind = document["kind"]
    if kind in SPECS:
        envelope = {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta"}
        check(document, {**envelope, "spec": SPECS[kind]}, kind)
    else:
        check(document, f"V1{kind}", kind)


def test_the_fields_of_a_restart_in_place_exist():
    (fields,) = [one for one in DOCUMENTS if "restartPolicyRules" in one]
    check({"name": "trainer", **fields}, "V1Container", "container")


def test_a_wrong_field_is_found():
    policy = {"rules": [{"action": "Ignore", "onExitCode": {}}]}
    with pytest.raises(AssertionError, match=r"no field \{'onExitCode'\}"):
        check({"podFailurePolicy": policy}, "V1JobSpec", "job")


def jobset():
    (found,) = [one for one in DOCUMENTS if one.get("kind") == "JobSet"]
    found["metadata"].update(namespace="default", uid="0123456789ab")
    return found


def runtime_as_jobset():
    (runtime,) = [one for one in DOCUMENTS if one.get("kind") == "ClusterTrainingRuntime"]
    metadata = {"name": "train", "namespace": "default", "uid": "0123456789ab"}
    return {"metadata": metadata, "spec": runtime["spec"]["template"]["spec"]}


EXPECTED = {
    1: ("FailJob", "FailJobSet"),
    2: ("FailJob", "FailJobSet"),
    3: ("FailJob", "FailJobSet"),
    4: ("FailJob", "FailJobSet"),
    75: ("Count", "RestartJobSet"),
    137: ("Count", "RestartJobSet"),
    143: ("Ignore", "RestartJobSet"),
}


@pytest.mark.parametrize("manifest", [jobset, runtime_as_jobset])
def test_the_rules_do_what_the_page_says(manifest):
    assert set(CLASSES) - {0} <= set(EXPECTED)
    (job,) = jobs_of(manifest())
    pod = pod_of(job, 1, 7)
    name = pod["spec"]["containers"][0]["name"]
    for code, (action, of_jobset) in EXPECTED.items():
        terminated = {"name": name, "state": {"terminated": {"exitCode": code}}}
        pod["status"] = {"containerStatuses": [terminated], "conditions": []}
        found, message = after_pod_failure(job, pod)
        assert found == action, code
        reason = "PodFailurePolicy" if found == "FailJob" else "BackoffLimitExceeded"
        assert after_job_failure(manifest(), reason, message) == of_jobset, code
        pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
        assert after_pod_failure(job, pod)[0] == "Ignore"


def test_the_pods_of_the_jobset_find_each_other():
    (job,) = jobs_of(jobset())
    pod = pod_of(job, 3, 7)
    pod["spec"]["nodeName"] = "gpu-3"
    environment = variables_of(pod)
    assert node_name(environment) == "gpu-3"
    command = pod["spec"]["containers"][0]["command"]
    assert command[:4] == ["holdfast", "run", "--nnodes", "4"]
    found = meeting_of(
        command[5:], nnodes=4, rendezvous=None, spares=0, stem="train", environment=environment
    )
    assert (found.nnodes, found.preferred_rank) == (4, 3)
    assert found.run_name == "train-train-01234567"
    assert environment["POD_NAME"] == "train-node-0-3-00007"


def test_the_pods_of_the_trainjob_find_each_other():
    (job,) = jobs_of(runtime_as_jobset())
    (trainjob,) = [one for one in DOCUMENTS if one.get("kind") == "TrainJob"]
    count = trainjob["spec"]["trainer"]["numNodes"]
    trainer = {"PET_NNODES": str(count), "PET_MASTER_ADDR": "train-node-0-0.train"}
    command = trainjob["spec"]["trainer"]["command"]
    assert command[:4] == ["holdfast", "run", "--spares", "1"]
    found = meeting_of(
        command[5:],
        nnodes=None,
        rendezvous=None,
        spares=1,
        stem="train",
        environment={**variables_of(pod_of(job, 0, 7)), **trainer},
    )
    assert (found.nnodes, found.is_first, found.host) == (4, True, None)
    assert found.run_name == "train-train-node-0-01234567"
