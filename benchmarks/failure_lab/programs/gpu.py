"""NVLink, CUDA and ECC errors: the driver's Xid lines, CUDA's error strings, NCCL's warnings.

Source of the Xid lines: NVIDIA, "XID Errors".
"""

# ruff: noqa: E501  (lines of logs stand as they are printed)

from failure_lab.programs.hardware import (
    ALL_REDUCE,
    ASYNCHRONOUS,
    BARRIER,
    LINEAR,
    hardware,
)

_NVLINK = (
    hardware(
        id="nvlink-xid74",
        reason="NVLinkError",
        cause="A fatal error on one NVLink of a GPU: Xid 74, then CUDA's own error for it.",
        root=r"Xid \(PCI:0000:4e:00\): 74|uncorrectable NVLink error",
        dialect="megatron",
        name="pretrain_gpt.py",
        prints="""\
[883102.114203] NVRM: Xid (PCI:0000:4e:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)
[883102.114811] NVRM: Xid (PCI:0000:4e:00): 45, pid=40117, name=python, Ch 00000018
""",
        raises=(
            "torch.AcceleratorError",
            """\
CUDA error: uncorrectable NVLink error detected during the execution
"""
            + ASYNCHRONOUS,
        ),
    ),
    hardware(
        id="nvlink-nvswitch-sxid",
        reason="NVLinkError",
        cause="An NVSwitch port failed fatally: SXid 20034, LTSSM fault up.",
        root=r"SXid|NVSwitch fatal error",
        accept_reasons=("CUDAError",),
        dialect="titan",
        prefix="[rank${rank}]:",
        ranks=3,
        rank=2,
        prints="""\
Mar 14 03:22:41 dgx-014 kernel: nvidia-nvswitch3: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 46 LTSSM Fault Up
Mar 14 03:22:41 dgx-014 kernel: nvidia-nvswitch3: SXid (PCI:0000:86:00.0): 20034, Severity 1 Engine instance 46 Sub-engine instance 00
Mar 14 03:22:42 dgx-014 nv-fabricmanager[2817]: detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 46
dgx-014:40213:41588 [2] NCCL INFO [Service thread] Connection closed by localRank 2
""",
    ),
    hardware(
        id="nvlink-dcgm-link-down",
        reason="NVLinkError",
        cause="The node's health check finds an NVLink of a GPU down.",
        root=r"link 11 is currently down",
        dialect="deepspeed",
        name="train_deepspeed.py",
        function="before_step",
        module="health",
        prints="""\
2025-05-06 11:48:03,310 [ERROR] health.gpu: dcgm: incident severity=FAIL system=NVLINK: GPU 5's NvLink link 11 is currently down Run a field diagnostic on the GPU.
""",
        exits="sys.exit(13)",
    ),
)

_CUDA = (
    hardware(
        id="cuda-illegal-access",
        reason="CUDAError",
        cause="A kernel read outside its memory.",
        root=r"AcceleratorError: CUDA error: an illegal memory access",
        dialect="hf",
        name="run_sft.py",
        module="flash_attention",
        function="varlen_backward",
        prints="",
        restart_helps=False,
        raises=(
            "torch.AcceleratorError",
            """\
CUDA error: an illegal memory access was encountered
"""
            + ASYNCHRONOUS,
        ),
    ),
    hardware(
        id="cuda-mmu-fault",
        reason="CUDAError",
        cause="An MMU fault (Xid 31), seen by the NCCL watchdog as an unspecified launch failure.",
        root=r"Xid \(PCI:0000:19:00\): 31|CUDA error: unspecified launch failure",
        dialect="megatron",
        ranks=4,
        rank=3,
        prefix="[default${local_rank}]:",
        prints="""\
[1203344.700316] NVRM: Xid (PCI:0000:19:00): 31, pid=28934, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC3 GPCCLIENT_T1_0 faulted @ 0x7f2a_5c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: unspecified launch failure
"""
        + ASYNCHRONOUS,
    ),
    hardware(
        id="cuda-cublas",
        reason="CUDAError",
        cause="cuBLAS failed to execute a matrix product.",
        root=r"RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED",
        dialect="lightning",
        name="fit.py",
        module="layers",
        function="project",
        within=LINEAR,
        prints="",
        raises=(
            "RuntimeError",
            (
                "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k, &falpha, a,"
                " CUDA_R_16BF, lda, b, CUDA_R_16BF, ldb, &fbeta, c, CUDA_R_16BF, ldc, compute_type, CUBLAS_GEMM_DEFAULT_TENSOR_OP)`"
            ),
        ),
    ),
    hardware(
        id="cuda-launch-failure-nccl",
        module="collectives",
        function="reduce_gradients",
        within=ALL_REDUCE,
        reason="CUDAError",
        cause="NCCL finds that a CUDA call failed with an unspecified launch failure.",
        root=r"Cuda failure 719|unhandled cuda error|ncclUnhandledCudaError",
        dialect="deepspeed",
        prints="""\
worker-3:2213:2907 [1] misc/strongstream.cc:395 NCCL WARN Cuda failure 719 'unspecified launch failure'
worker-3:2213:2907 [1] NCCL INFO init.cc:1958 -> 1
""",
        raises=(
            "torch.distributed.DistBackendError",
            (
                """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 719 'unspecified launch failure'"""
            ),
        ),
    ),
)

_ECC = (
    hardware(
        id="ecc-double-bit",
        reason="ECCError",
        cause="A double bit error in the GPU's memory: Xid 48, then CUDA's uncorrectable ECC error.",
        root=r"Xid \(PCI:0000:3b:00\): (?:48|63)|uncorrectable ECC error",
        dialect="hf",
        prints="""\
kernel: [ 5511.304118] NVRM: Xid (PCI:0000:3b:00): 48, pid=91231, name=python3, DBE (double bit error) ECC Error occurred on GPU: An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 5, subpartition 1.
kernel: [ 5511.304260] NVRM: Xid (PCI:0000:3b:00): 63, pid=91231, name=python3, Row Remapper: New row marked for remapping, reset gpu to activate.
""",
        raises=(
            "torch.AcceleratorError",
            """\
CUDA error: uncorrectable ECC error encountered
"""
            + ASYNCHRONOUS,
        ),
    ),
    hardware(
        id="ecc-contained",
        reason="ECCError",
        cause="A contained memory error on the GPU: Xid 94.",
        root=r"Xid \(PCI:0000:9b:00\): 94",
        accept_reasons=("CUDAError",),
        dialect="titan",
        name="train.py",
        prefix="[rank${rank}]:",
        ranks=4,
        rank=0,
        prints="""\
[1688321.882710] NVRM: Xid (PCI:0000:9b:00): 94, pid=77120, name=pt_main_thread, Contained: SM (0x1). RST: No, D-RST: No
[1688321.883055] NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)
""",
        exits="os.kill(os.getpid(), signal.SIGKILL)",
    ),
    hardware(
        id="ecc-nccl-214",
        reason="ECCError",
        cause="NCCL's work queue meets an uncorrectable ECC error.",
        root=r"Cuda failure|unhandled cuda error|ncclUnhandledCudaError",
        accept_reasons=("CUDAError",),
        dialect="megatron",
        name="pretrain_llama.py",
        module="pipeline",
        function="synchronize",
        within=BARRIER,
        prints="""\
gpu-a-07:8812:9241 [1] enqueue.cc:1402 NCCL WARN Cuda failure 214 'uncorrectable ECC error encountered'
gpu-a-07:8812:9241 [1] NCCL INFO group.cc:296 -> 1
""",
        raises=(
            "torch.distributed.DistBackendError",
            (
                """\
NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 'uncorrectable ECC error encountered'"""
            ),
        ),
    ),
)

PROGRAMS = (*_NVLINK, *_CUDA, *_ECC)
