"""Test the private Kubernetes itself: pods are processes, and their ends have consequences."""

import sys

import pytest

from holdfast.testing.kubernetes import PrivateKubernetes

TELL = 'echo "$HOSTNAME on $NODE" > "$HOLDFAST_TERMINATION_LOG"; '
ONCE = TELL + 'test -e "$HOSTNAME.ran" || { touch "$HOSTNAME.ran"; exit 143; }'
FOR_EVER = TELL + "trap 'exit 143' TERM; while true; do sleep 0.05; done"


def manifest(script, *, pods=2, grace_s=30, **job):
    field = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    container = {
        "name": "main",
        "command": ["sh", "-c", script],
        "env": [{"name": "NODE", "valueFrom": field}],
    }
    pod = {"terminationGracePeriodSeconds": grace_s, "containers": [container]}
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [143]}},
    ]
    spec = {
        "completions": pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        **job,
        "template": {"spec": pod},
    }
    jobs = [{"name": "j", "replicas": 1, "template": {"spec": spec}}]
    return {
        "kind": "JobSet",
        "metadata": {"name": "s"},
        "spec": {"failurePolicy": {"maxRestarts": 1}, "replicatedJobs": jobs},
    }


@pytest.fixture
def kubernetes(tmp_path):
    with PrivateKubernetes(tmp_path, nodes=2) as kubernetes:
        yield kubernetes


def message(kubernetes, hostname):
    (status,) = kubernetes.pod(hostname)["status"]["containerStatuses"]
    return status["state"].get("terminated", {}).get("message")


def phase(kubernetes, hostname):
    return kubernetes.pod(hostname)["status"]["phase"]


def test_ignored_failures_are_started_again_until_all_indexes_have_succeeded(kubernetes):
    kubernetes.apply(manifest(ONCE))
    kubernetes.wait_for(lambda: kubernetes.condition("jobsets", "s", "Completed"))
    told = {message(kubernetes, f"s-j-0-{index}") for index in range(2)}
    assert {text.split()[0] for text in told} == {"s-j-0-0", "s-j-0-1"}
    assert {text.split()[2] for text in told} <= {"n1", "n2"}
    assert len(kubernetes.objects("pods")) == 4


def test_a_failed_job_restarts_the_jobset_within_its_limit(kubernetes, tmp_path):
    kubernetes.apply(manifest("echo x >> starts; exit 1", pods=1))
    kubernetes.wait_for(lambda: kubernetes.condition("jobsets", "s", "Failed"))
    failed = kubernetes.condition("jobsets", "s", "Failed")
    assert "failed with exit code 1 matching FailJob rule at index 0" in failed["message"]
    assert (tmp_path / "starts").read_text() == "x\nx\n"


def test_a_deleted_pod_gets_sigterm_then_sigkill_and_another_node_takes_its_place(kubernetes):
    kubernetes.apply(manifest(FOR_EVER, pods=1))
    kubernetes.wait_for(
        lambda: kubernetes.objects("pods") and phase(kubernetes, "s-j-0-0") == "Running"
    )
    first = kubernetes.pod("s-j-0-0")
    node = first["spec"]["nodeName"]
    kubernetes.patch("nodes", node, {"spec": {"unschedulable": True}})
    kubernetes.evict("s-j-0-0")

    def moved():
        pod = kubernetes.pod("s-j-0-0")
        return pod["spec"].get("nodeName") not in (None, node)

    kubernetes.wait_for(moved)
    kubernetes.kill_pod("s-j-0-0")
    # 137 is neither in a rule nor within the backoff limit: the JobSet starts anew.
    kubernetes.wait_for(
        lambda: kubernetes.get("jobsets", "s").get("status", {}).get("restarts") == 1
    )


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_period(kubernetes):
    script = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); open('up', 'w'); time.sleep(600)"
    )
    deaf = manifest("", pods=1, grace_s=0)
    container = deaf["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    container[0]["command"] = [sys.executable, "-c", script]
    kubernetes.apply(deaf)
    kubernetes.wait_for((kubernetes.folder / "up").exists)
    kubernetes.delete("jobsets", "s")
    kubernetes.delete("jobs", "s-j-0")
    kubernetes.wait_for(lambda: not kubernetes.objects("pods"))


def test_what_does_not_happen_is_shown_with_the_output_of_the_pods(kubernetes):
    kubernetes.apply(manifest("exec no-such-program", pods=1))
    logs = kubernetes.folder / "pods"
    kubernetes.wait_for(
        lambda: any("no-such-program" in one.read_text() for one in logs.glob("*.log"))
    )
    with pytest.raises(TimeoutError, match="no-such-program"):
        kubernetes.wait_for(lambda: False, timeout_s=0.0)
