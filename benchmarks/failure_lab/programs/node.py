"""Lost nodes: the last lines of the kernel, Slurm, Kubernetes and Ray."""

from failure_lab.program import Program
from failure_lab.programs.hardware import hardware

PROGRAMS = (
    hardware(
        id="node-fell-off-bus",
        reason="NodeFailure",
        cause="A GPU has fallen off the bus: Xid 79.",
        root=r"fallen off the bus",
        accept_reasons=("CUDAError",),
        dialect="megatron",
        ranks=3,
        rank=1,
        prints="""\
[402911.551276] NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[402911.551301] NVRM: GPU 0000:5d:00.0: GPU has fallen off the bus.
[402911.551322] NVRM: GPU 0000:5d:00.0: GPU serial number is 1650522014401.
""",
        exits="os.kill(os.getpid(), signal.SIGKILL)",
    ),
    Program(
        id="node-slurm-node-fail",
        reason="NodeFailure",
        cause="Slurm lost node017 and cancelled the job.",
        root=r"DUE TO NODE FAILURE|Node failure on",
        restart_helps=True,
        faulty={"node": "node017"},
        launcher="shell",
        name="job.sh",
        dialect=None,
        files={
            "train.py": """\
import sys
for step in range(1, 7):
    print(f'step {step}: loss={3.1 - step / 40:.3f}', flush=True)
"""
        },
        script="""
        srun() { python "$@" & wait $!; }
        srun train.py
        echo "srun: error: Node failure on node017" >&2
        echo "srun: Job step aborted: Waiting up to 62 seconds for job step to finish." >&2
        echo "slurmstepd: error: *** JOB 48213 ON node004 CANCELLED AT 2025-03-02T04:12:55 DUE TO NODE FAILURE," \\
             "SEE SLURMCTLD LOG FOR DETAILS ***" >&2
        exit 1
        """,
    ),
    hardware(
        id="node-machine-check",
        reason="NodeFailure",
        cause="The processor reports a fatal machine check and the kernel panics.",
        root=r"Machine Check Exception|Kernel panic",
        dialect="deepspeed",
        prints="""\
[714522.210340] mce: [Hardware Error]: CPU 46: Machine Check Exception: 5 Bank 1: bd80000000100134
[714522.210352] mce: [Hardware Error]: RIP 10:<ffffffff81a0f5e2> {intel_idle+0x62/0xb0}
[714522.210377] Kernel panic - not syncing: Fatal local machine check
""",
        exits="os.kill(os.getpid(), signal.SIGKILL)",
    ),
    hardware(
        id="node-kubernetes-not-ready",
        reason="NodeFailure",
        cause="The kubelet of a node stopped answering and its pods were evicted.",
        root=r"NodeNotReady|node\.kubernetes\.io/unreachable",
        dialect="hf",
        rank=0,
        faulty={"node": "gke-a3-pool-7f21"},
        prints="""\
6m12s   Warning   NodeNotReady             pod/llm-worker-0    Node is not ready
62s     Normal    TaintManagerEviction     pod/llm-worker-0    Marking for deletion Pod train/llm-worker-0
60s     Warning   NodeNotReady             node/gke-a3-pool-7f21    Node gke-a3-pool-7f21 status is now: NodeNotReady
""",
        exits="os.kill(os.getpid(), signal.SIGTERM)",
    ),
)
