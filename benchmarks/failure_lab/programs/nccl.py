"""Collectives that time out, and lost peers."""

# ruff: noqa: E501  (lines of logs stand as they are printed)

from failure_lab.program import Program
from failure_lab.programs.hardware import ALL_REDUCE, hardware

_TIMEOUT = (
    hardware(
        id="nccl-timeout-allreduce",
        reason="NCCLTimeoutError",
        cause="An all-reduce did not end within its limit.",
        root=r"Watchdog caught collective operation timeout|\(either an error or timeout\) detected by watchdog",
        dialect="hf",
        faulty={},
        prints="""\
[rank1]:[E1206 18:44:12.715298746 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7753, OpType=ALLREDUCE, NumelIn=544997376, NumelOut=544997376, Timeout(ms)=600000) ran for 600061 milliseconds before timing out.
[rank1]:[E1206 18:44:12.715588844 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 1] Exception (either an error or timeout) detected by watchdog at work: 7753, last enqueued NCCL work: 7755, last completed NCCL work: 7752.
[rank1]:[E1206 18:44:13.820115002 ProcessGroupNCCL.cpp:621] [Rank 1] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.
[rank1]:[E1206 18:44:13.820131711 ProcessGroupNCCL.cpp:627] [Rank 1] To avoid data inconsistency, we are taking the entire process down.
terminate called after throwing an instance of 'c10::DistBackendError'
""",
    ),
    hardware(
        id="nccl-timeout-reduce-scatter",
        reason="NCCLTimeoutError",
        cause="A reduce-scatter of one process group did not end within its limit.",
        root=r"Watchdog caught collective operation timeout",
        dialect="megatron",
        faulty={},
        ranks=4,
        rank=2,
        prefix="[default${local_rank}]:",
        prints="""\
[E ProcessGroupNCCL.cpp:475] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=199, OpType=_REDUCE_SCATTER_BASE, NumelIn=7098994688, NumelOut=443687168, Timeout(ms)=600000) ran for 882722 milliseconds before timing out.
terminate called after throwing an instance of 'std::runtime_error'
  what():  [Rank 2] NCCL watchdog thread terminated with exception: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=199, OpType=_REDUCE_SCATTER_BASE, NumelIn=7098994688, NumelOut=443687168, Timeout(ms)=600000) ran for 882722 milliseconds before timing out.
""",
    ),
    Program(
        id="nccl-timeout-monitored-barrier",
        reason="NCCLTimeoutError",
        cause="Rank 1 sleeps through a monitored barrier.",
        root=r"failed to pass monitoredBarrier",
        accept_reasons=("Others",),
        restart_helps=True,
        faulty={"rank": 1},
        ranks=3,
        dialect="titan",
        script="""
        for step in training(6):
            if step == 3:
                if RANK == 1:
                    time.sleep(12)
                dist.monitored_barrier(timeout=timedelta(seconds=3))
        """,
    ),
    Program(
        id="nccl-timeout-gloo-recv",
        reason="NCCLTimeoutError",
        cause="One rank computes for longer than the collective's limit, and its peers give up.",
        root=r"Timed out waiting \d+ms for",
        accept_reasons=("Others",),
        restart_helps=True,
        faulty={"rank": 0},
        ranks=2,
        dialect="plain",
        name="train_moe.py",
        script="""
        join(timeout_s=4)
        for step in training(6):
            if step == 4 and RANK == 0:
                print("rebalancing experts", flush=True)
                time.sleep(9)
        """,
    ),
)

_REMOTE = (
    hardware(
        id="nccl-remote-closed",
        module="collectives",
        function="sync_gradients",
        within=ALL_REDUCE,
        reason="NCCLRemoteError",
        cause="A remote peer closed its socket during a collective.",
        root=r"Connection closed by remote peer|ncclRemoteError|remote process exited",
        accept_reasons=("NetworkError",),
        dialect="deepspeed",
        faulty={"node": "node2"},
        prints="""\
node0:13571:13644 [1] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer node2<42830>
node0:13571:13644 [1] NCCL INFO misc/socket.cc:749 -> 6
node0:13571:13644 [1] NCCL INFO transport/net_socket.cc:451 -> 6
""",
        raises=(
            "torch.distributed.DistBackendError",
            (
                """\
NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, remote process exited or there was a network error, NCCL version 2.20.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer node2<42830>"""
            ),
        ),
    ),
    hardware(
        id="nccl-remote-reset",
        reason="NCCLRemoteError",
        cause="A receive from a remote peer failed: the peer reset the connection.",
        root=r"Call to recv from .* failed|Net : Connection closed by remote peer",
        accept_reasons=("NetworkError",),
        dialect="megatron",
        faulty={},
        ranks=3,
        rank=2,
        prints="""\
a100-st-22:183006:183220 [2] misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.200.84.247<58355> failed : Connection reset by peer
a100-st-22:183006:183220 [2] NCCL INFO misc/socket.cc:535 -> 6
a100-st-22:183006:183220 [2] proxy.cc:1119 NCCL WARN [Proxy Service 9] Failed to execute operation Connect from rank 9, retcode 6
""",
    ),
    hardware(
        id="nccl-remote-async",
        reason="NCCLRemoteError",
        cause="The watchdog finds a communicator broken by a remote error.",
        root=r"ncclRemoteError|remote process exited",
        accept_reasons=("NetworkError",),
        dialect="lightning",
        name="fit_vit.py",
        faulty={},
        rank=0,
        prints="""\
[rank0]:[E613 02:11:40.198127311 ProcessGroupNCCL.cpp:542] [Rank 0] Collective WorkNCCL(SeqNum=90211, OpType=ALLGATHER, NumelIn=4194304, NumelOut=67108864, Timeout(ms)=1800000) raised the following async exception: NCCL error: remote process exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
terminate called after throwing an instance of 'c10::DistBackendError'
""",
    ),
    Program(
        id="nccl-remote-gloo-closed",
        reason="NCCLRemoteError",
        cause="A peer left without a word in the middle of training; only the others say so.",
        root=r"Connection (?:closed|reset) by peer",
        accept_reasons=("NetworkError", "ConnectionError", "Others"),
        restart_helps=True,
        ranks=2,
        dialect="hf",
        name="dpo.py",
        script="""
        for step in training(6):
            if step == 3 and RANK == 1:
                os._exit(0)
        """,
    ),
)

PROGRAMS = (*_TIMEOUT, *_REMOTE)
