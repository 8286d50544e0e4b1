"""Run a Kubernetes that is private to one test: an API server whose pods are local processes.

The API server is kmock's emulator. A small controller reads Nodes, JobSets, Jobs and Pods from the
server every few milliseconds. It does the work of the scheduler, the kubelets and the controllers
of Job and JobSet:

    with PrivateKubernetes(tmp_path, nodes=3) as kubernetes:
        kubernetes.apply(manifest)
        kubernetes.kill_pod("train-node-0-1")
        kubernetes.wait_for(lambda: kubernetes.condition("jobsets", "train", "Completed"))

- A Pod runs the command of its first container on a Node that is ready, free and not cordoned, and
  whose taints the Pod tolerates. Each Node takes one Pod at a time; other Pods wait.
- Exit codes and termination messages are in the Pod's status. The controller applies the
  `podFailurePolicy` and `backoffLimit` of a Job and the `failurePolicy` of a JobSet (see
  `kubernetes_policies`).
- A deleted Pod receives SIGTERM, and SIGKILL after its grace period.

There are no images, volumes, services or quotas. A Pod has one container, and all Pods share this
host's network and files. The server merges objects as plain JSON, and checks neither schemas nor
permissions nor `resourceVersion`. This needs `kmock` (PyPI) and `setpriv` (util-linux).
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.core.errors import BadUse
from holdfast.core.processes import kill_descendants
from holdfast.testing import kubernetes_policies as policies

LOOK_S = 0.05
GRACE_S = 30
"""The grace period, in seconds, of a Pod that states none, as in Kubernetes."""
MESSAGE_BYTES = 4096
"""The most bytes of a termination message that the kubelet keeps."""
END_TIMEOUT_S = 30.0
STORY_LINES = 10
KINDS = {
    "nodes": ("", "v1"),
    "pods": ("", "v1"),
    "jobs": ("batch", "v1"),
    "jobsets": ("jobset.x-k8s.io", "v1alpha2"),
}
_PLURALS = {"Node": "nodes", "Pod": "pods", "Job": "jobs", "JobSet": "jobsets"}


class PrivateKubernetes:
    """An API server and its Pods, which exist until the end of the `with` block.

    Args:
        folder: receives the kubeconfig, and for each Pod its output (`pods/NAME.log`) and
            termination message.
        nodes: the number of Nodes, which are n1, n2, ….

    Attributes:
        environment: the environment variables with which a process finds only this API server
            (KUBECONFIG).

    Raises:
        BadUse: kmock or setpriv is not installed.
    """

    namespace = "default"

    def __init__(self, folder: Path, *, nodes: int = 2) -> None:
        try:
            import kmock
        except ImportError as error:
            raise BadUse("kmock is not installed. Install it: pip install kmock") from error
        if shutil.which("setpriv") is None:
            raise BadUse(
                "setpriv is not installed. Install it (Debian: apt-get install util-linux)."
            )
        self._kmock = kmock
        self.folder = folder.absolute()
        self.node_names = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.environment: dict[str, str] = {"KUBECONFIG": str(self.folder / "kubeconfig")}
        self._server: Any = None
        self._url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_up = threading.Event()
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._numbers = itertools.count(1)
        self._processes: dict[str, _Process] = {}
        self._counted: set[str] = set()
        """The names of the failed Pods that a Job has handled."""
        self._failures: dict[str, int] = {}
        """By the uid of each Job, the failures that count for its `backoffLimit`."""

    def __enter__(self) -> Self:
        (self.folder / "pods").mkdir(parents=True, exist_ok=True)
        self._thread.start()
        self._is_up.wait()
        self._check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join(END_TIMEOUT_S)
        if kind is None:
            self._check()

    # For tests

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """Create an object; the controller reacts within milliseconds."""
        plural = _PLURALS[manifest["kind"]]
        metadata = {"namespace": self.namespace, **manifest["metadata"]}
        metadata.setdefault("uid", f"{metadata['name']}-{next(self._numbers)}")
        self._call(self._create(plural, {**manifest, "metadata": metadata}))

    def objects(self, plural: str) -> list[dict[str, Any]]:
        """Return the objects of one kind: "nodes", "pods", "jobs" or "jobsets"."""
        found: list[dict[str, Any]] = self._call(self._listed(plural))
        return found

    def get(self, plural: str, name: str) -> dict[str, Any]:
        """Return one object.

        Raises:
            KeyError: there is no such object.
        """
        for one in self.objects(plural):
            if one["metadata"]["name"] == name:
                return one
        raise KeyError(f"There is no {name} among the {plural}.")

    def condition(self, plural: str, name: str, kind: str) -> dict[str, Any] | None:
        """Return the condition of type `kind` of an object; None unless its status is True."""
        conditions = (self.get(plural, name).get("status") or {}).get("conditions", [])
        return next(
            (one for one in conditions if (one["type"], one["status"]) == (kind, "True")), None
        )

    def pod(self, hostname: str) -> dict[str, Any]:
        """Return the newest Pod with a host name such as JOBSET-JOB-0-1.

        Raises:
            KeyError: there is no such Pod.
        """
        found = [one for one in self.objects("pods") if one["spec"]["hostname"] == hostname]
        if not found:
            raise KeyError(f"There is no Pod {hostname}.")
        return max(found, key=lambda one: str(one["metadata"]["name"]))

    def output(self, hostname: str) -> str:
        """Return the output so far of the newest Pod with a host name."""
        return (self.folder / "pods" / f"{self.pod(hostname)['metadata']['name']}.log").read_text()

    def patch(self, plural: str, name: str, change: Mapping[str, Any]) -> None:
        """Merge a change into an object."""
        self._call(self._patch(plural, name, change))

    def answer(self, request: str, status: int) -> None:
        """Answer all requests such as "patch /api/v1/nodes/n1" with an HTTP status such as 403."""

        def refuse() -> None:
            self._server[request] << status

        self._call(self._in_loop(refuse))

    def kill_pod(self, hostname: str) -> None:
        """Kill all processes of a running Pod with SIGKILL, as the out-of-memory killer does.

        Raises:
            KeyError: no such Pod is running.
        """
        self._call(self._in_loop(self._processes[self.pod(hostname)["metadata"]["name"]].kill))

    def evict(self, hostname: str) -> None:
        """End a Pod as a drain or a preemption does.

        The Pod gets the condition DisruptionTarget, and then its processes get SIGTERM.
        """
        name = self.pod(hostname)["metadata"]["name"]
        conditions = self.get("pods", name)["status"]["conditions"]
        condition = _condition("DisruptionTarget", reason="EvictionByEvictionAPI")
        self.patch("pods", name, {"status": {"conditions": [*conditions, condition]}})
        self._call(self._delete("pods", name))

    def delete(self, plural: str, name: str) -> None:
        """Delete an object; a Pod receives SIGTERM first."""
        self._call(self._delete(plural, name))

    def wait_for(self, holds: Callable[[], object], *, timeout_s: float = 90.0) -> None:
        """Wait until `holds` returns a true value.

        Raises:
            TimeoutError: this did not happen in time; the message has the Pods' phases and output.
        """
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            self._check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"It did not happen within {timeout_s:g} s.\n{self._story()}")
            time.sleep(LOOK_S)

    def _story(self) -> str:
        lines = [
            f"{one['metadata']['name']}: {one['status'].get('phase', one['status'].get('conditions'))}"
            for plural in ("jobsets", "jobs", "pods")
            for one in self.objects(plural)
            if one.get("status")
        ]
        for log in sorted((self.folder / "pods").glob("*.log")):
            lines += [
                f"--- {log.name}",
                *log.read_text(errors="replace").splitlines()[-STORY_LINES:],
            ]
        return "\n".join(lines)

    # The API server, in a thread of its own

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # the test's thread raises it
            self._error = error
        finally:
            self._is_up.set()
            self._loop.close()

    async def _serve(self) -> None:
        async with (
            self._kmock.KubernetesEmulator() as server,
            self._kmock.Server(server) as listening,
        ):
            self._server, self._url = server, str(listening.url).rstrip("/")
            for plural in KINDS:
                info = self._kmock.ResourceInfo(namespaced=plural != "nodes")
                server.resources[self._resource(plural)] = info
            for name in self.node_names:
                node = {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": name, "annotations": {}},
                    "spec": {},
                    "status": {"conditions": [_condition("Ready", reason="KubeletReady")]},
                }
                await self._create("nodes", node)
            self._write_kubeconfig()
            self._is_up.set()
            try:
                while not self._is_over.is_set():
                    await self._look()
                    await asyncio.sleep(LOOK_S)
            finally:
                for process in self._processes.values():
                    process.kill()

    def _write_kubeconfig(self) -> None:
        import yaml

        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self._url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [
                {
                    "name": "x",
                    "context": {"cluster": "c", "user": "u", "namespace": self.namespace},
                }
            ],
            "current-context": "x",
        }
        Path(self.environment["KUBECONFIG"]).write_text(yaml.safe_dump(config))

    def _check(self) -> None:
        error = self._error
        if error is not None:
            raise RuntimeError("The private Kubernetes has failed.") from error

    def _call(self, coroutine: Any) -> Any:
        self._check()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(END_TIMEOUT_S)

    @staticmethod
    async def _in_loop(function: Callable[[], None]) -> None:
        function()

    def _path(self, plural: str, name: str | None = None) -> str:
        group, version = KINDS[plural]
        base = f"/apis/{group}/{version}" if group else f"/api/{version}"
        scope = "" if plural == "nodes" else f"/namespaces/{self.namespace}"
        return f"{base}{scope}/{plural}" + ("" if name is None else f"/{name}")

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async with self._server.request(method, path, json=body) as answer:
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {await answer.text()}")
            return await answer.json()

    async def _create(self, plural: str, thing: Mapping[str, Any]) -> None:
        await self._request("POST", self._path(plural), thing)

    async def _patch(self, plural: str, name: str, change: Mapping[str, Any]) -> None:
        await self._request("PATCH", self._path(plural, name), change)

    async def _delete(self, plural: str, name: str) -> None:
        await self._request("DELETE", self._path(plural, name))

    async def _listed(self, plural: str) -> list[dict[str, Any]]:
        # Read from memory, since the controllers look many times a second.
        wanted = self._resource(plural)
        objects = self._server.objects.items()
        return [one.raw for (kind, _, _), one in objects if kind == wanted and not one.deleted]

    def _resource(self, plural: str) -> Any:
        return self._kmock.resource(*KINDS[plural], plural)

    # The controllers

    async def _look(self) -> None:
        jobsets, jobs, pods = [await self._listed(one) for one in ("jobsets", "jobs", "pods")]
        for jobset in jobsets:
            await self._look_at_jobset(jobset, [one for one in jobs if _is_of(one, jobset)])
        for job in jobs:
            await self._look_at_job(job, [one for one in pods if _is_of(one, job)])
        owners = _uids(await self._listed("jobs"))
        nodes = await self._listed("nodes")
        for pod in await self._listed("pods"):
            await self._look_at_pod(pod, owners, nodes)

    async def _look_at_jobset(self, jobset: Mapping[str, Any], jobs: list[dict[str, Any]]) -> None:
        name, status = jobset["metadata"]["name"], jobset.get("status") or {}
        if _is_finished(jobset) or jobset["spec"].get("suspend"):
            return
        wanted = policies.jobs_of(jobset)
        current = [one for one in jobs if one["metadata"]["uid"] in _uids(wanted)]
        for job in wanted:
            if job["metadata"]["uid"] not in _uids(current):
                if any(one["metadata"]["name"] == job["metadata"]["name"] for one in jobs):
                    return  # the Job of the last restart is still being deleted
                job["metadata"]["ownerReferences"] = [{"uid": jobset["metadata"]["uid"]}]
                await self._create("jobs", job)
        failed = [_true(job, "Failed") for job in current]
        if first := next((one for one in failed if one), None):
            action = policies.after_job_failure(jobset, first["reason"], first["message"])
            if action == "FailJobSet":
                condition = _condition("Failed", reason="FailedJobs", message=first["message"])
                await self._patch("jobsets", name, {"status": {"conditions": [condition]}})
                return
            counts = not action.endswith("AndIgnoreMaxRestarts")
            new = {
                "restarts": int(status.get("restarts", 0)) + 1,
                "restartsCountTowardsMax": int(status.get("restartsCountTowardsMax", 0)) + counts,
            }
            await self._patch("jobsets", name, {"status": new})
            for job in current:
                await self._delete("jobs", job["metadata"]["name"])
        elif len(current) == len(wanted) and all(_true(job, "Complete") for job in current):
            condition = _condition("Completed", reason="AllJobsCompleted")
            await self._patch("jobsets", name, {"status": {"conditions": [condition]}})

    async def _look_at_job(self, job: Mapping[str, Any], pods: list[dict[str, Any]]) -> None:
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        if _is_finished(job):
            return
        for pod in pods:
            if pod["status"]["phase"] != "Failed" or pod["metadata"]["name"] in self._counted:
                continue
            self._counted.add(pod["metadata"]["name"])
            action, message = policies.after_pod_failure(job, pod)
            if action == "FailJob":
                await self._end_job(job, pods, "PodFailurePolicy", message)
                return
            self._failures[uid] = self._failures.get(uid, 0) + (action == "Count")
        limit = int(job["spec"].get("backoffLimit", policies.DEFAULT_BACKOFF_LIMIT))
        if self._failures.get(uid, 0) > limit:
            message = "Job has reached the specified backoff limit"
            await self._end_job(job, pods, "BackoffLimitExceeded", message)
            return
        missing = policies.missing_indexes(job, pods)
        for index in missing:
            await self._create("pods", policies.pod_of(job, index, next(self._numbers)))
        if not missing and all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in pods):
            condition = _condition("Complete", reason="CompletionsReached")
            await self._patch("jobs", name, {"status": {"conditions": [condition]}})

    async def _end_job(
        self, job: Mapping[str, Any], pods: list[dict[str, Any]], reason: str, message: str
    ) -> None:
        condition = _condition("Failed", reason=reason, message=message)
        await self._patch("jobs", job["metadata"]["name"], {"status": {"conditions": [condition]}})
        for pod in pods:
            if pod["status"]["phase"] in ("Pending", "Running"):
                await self._delete("pods", pod["metadata"]["name"])

    # The scheduler and the kubelets

    async def _look_at_pod(
        self, pod: Mapping[str, Any], jobs: set[str], nodes: list[dict[str, Any]]
    ) -> None:
        metadata, status = pod["metadata"], pod["status"]
        name, phase = metadata["name"], status["phase"]
        process = self._processes.get(name)
        is_orphan = metadata["ownerReferences"][0]["uid"] not in jobs
        is_deleted = "deletionTimestamp" in metadata
        if is_orphan and not is_deleted and phase in ("Pending", "Running"):
            await self._delete("pods", name)
            return
        if process is not None and (code := process.returncode) is not None:
            del self._processes[name]
            await self._patch("pods", name, self._ended(pod, code))
        elif process is not None and is_deleted:
            process.end(int(pod["spec"].get("terminationGracePeriodSeconds", GRACE_S)))
        elif process is None and phase == "Pending" and not is_deleted:
            pods = await self._listed("pods")
            running = [one for one in pods if one["status"]["phase"] == "Running"]
            taken = {one["spec"]["nodeName"] for one in running}
            free = [one for one in nodes if one["metadata"]["name"] not in taken]
            fit = next((one for one in free if policies.may_run(one, pod)), None)
            if fit is not None:
                await self._start(pod, fit["metadata"]["name"])
        elif process is None and is_deleted:
            if phase in ("Pending", "Running"):
                await self._patch("pods", name, {"status": {"phase": "Failed"}})
            await self._patch("pods", name, {"metadata": {"finalizers": []}})

    async def _start(self, pod: Mapping[str, Any], node: str) -> None:
        name = pod["metadata"]["name"]
        message = self.folder / "pods" / f"{name}.message"
        message.touch()
        placed = {**pod, "spec": {**pod["spec"], "nodeName": node}}
        placed["status"] = {**pod["status"], "podIP": "127.0.0.1"}
        outside = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM", "KUBERNETES", "JOB", "PET_", "HOLDFAST_"))
        }
        variables = {
            **outside,
            **self.environment,
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "HOLDFAST_TERMINATION_LOG": str(message),
            **policies.variables_of(placed),
        }
        container = pod["spec"]["containers"][0]
        self._processes[name] = _Process(
            [*container.get("command", []), *container.get("args", [])],
            variables,
            folder=Path(container.get("workingDir", self.folder)),
            log=self.folder / "pods" / f"{name}.log",
        )
        change = {
            "spec": {"nodeName": node},
            "status": {
                "phase": "Running",
                "podIP": "127.0.0.1",
                "conditions": [_condition("Ready")],
                "containerStatuses": [{"name": container["name"], "state": {"running": {}}}],
            },
        }
        await self._patch("pods", name, change)

    def _ended(self, pod: Mapping[str, Any], code: int) -> dict[str, Any]:
        exit_code = code if code >= 0 else 128 - code
        path = self.folder / "pods" / f"{pod['metadata']['name']}.message"
        message = path.read_bytes()[-MESSAGE_BYTES:].decode(errors="replace")
        terminated = {"exitCode": exit_code, "message": message}
        name = pod["spec"]["containers"][0]["name"]
        statuses = [{"name": name, "state": {"terminated": terminated}}]
        phase = "Failed" if exit_code else "Succeeded"
        return {"status": {"phase": phase, "containerStatuses": statuses}}


class _Process:
    """The processes of one Pod: the first process and all its descendants."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], *, folder: Path, log: Path
    ) -> None:
        # setpriv has the kernel end the Pod with the test.
        with log.open("ab") as out:
            self._first = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command],
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._killed_at_s: float | None = None

    @property
    def returncode(self) -> int | None:
        """Return the exit code, negative for a signal; None while the first process is running."""
        return self._first.poll()

    def end(self, grace_s: float) -> None:
        """On the first call send SIGTERM; on the first call after the grace period send SIGKILL."""
        now_s = time.monotonic()
        if self._killed_at_s is None:
            self._killed_at_s = now_s + grace_s
            self._first.send_signal(signal.SIGTERM)
        elif now_s >= self._killed_at_s:
            self.kill()

    def kill(self) -> None:
        """Kill all processes of the Pod with SIGKILL."""
        if self._first.poll() is not None:
            return
        # A stopped process starts no more children, and stays the parent of its children.
        self._first.send_signal(signal.SIGSTOP)
        kill_descendants(self._first.pid, timeout_s=END_TIMEOUT_S)
        self._first.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._first.wait(END_TIMEOUT_S)


def _condition(kind: str, *, reason: str = "", message: str = "") -> dict[str, str]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": now,
    }


def _true(thing: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    conditions = (thing.get("status") or {}).get("conditions", [])
    return next((one for one in conditions if (one["type"], one["status"]) == (kind, "True")), None)


def _is_finished(thing: Mapping[str, Any]) -> bool:
    return any(_true(thing, kind) for kind in ("Complete", "Completed", "Failed"))


def _uids(things: list[dict[str, Any]]) -> set[str]:
    return {one["metadata"]["uid"] for one in things}


def _is_of(thing: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    owners = thing["metadata"].get("ownerReferences", [])
    return any(one["uid"] == owner["metadata"]["uid"] for one in owners)
