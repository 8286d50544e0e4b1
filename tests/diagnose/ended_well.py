"""Define logs of runs that ended well, with the alarming lines of healthy runs, by launcher."""

# ruff: noqa: E501  (lines of logs stand as they are printed)

STACK = ["Traceback (most recent call last):", '  File "/srv/app/fit.py", line 88, in fit']


def megatron():
    """Return a lost peer after the end, and a checkpoint index that was absent at the start."""
    return [
        "FileNotFoundError: [Errno 2] No such file or directory: '/idx/doc.npy'",
        *(
            f" [2026-02-11 04:0{n}:00] iteration {n:8d}/       9 | elapsed time per iteration (ms): 812.1 | lm loss: 2.3{n}E+00 |"
            for n in range(1, 10)
        ),
        "  successfully saved checkpoint from iteration       9 to /ckpt/m [ t 1/2, p 1/1 ]",
        "[after training is done] datetime: 2026-02-11 04:10:30",
        "[rank2]:[W211 04:10:33.118 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3): failed to recv, got 0 bytes",
    ]


def trainer_of_transformers():
    """Return a temporary shortage of memory, and an unreachable tracker."""
    return [
        " 20%|##        | 2/10 [00:04<00:16,  2.0s/it]",
        *STACK,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.2 GiB.",
        "halving the batch to 4 and trying again",
        *(f" {n}0%|##    | {n}/10 [00:0{n}<00:01,  2.0s/it]" for n in range(3, 10)),
        "100%|##########| 10/10 [00:20<00:00,  2.0s/it]",
        "{'train_runtime': 20.4, 'train_samples_per_second': 41.2, 'train_loss': 2.1, 'epoch': 1.0}",
        "urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='tracker', port=443): Max retries exceeded",
        "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 6 leaked semaphore objects",
    ]


def lightning():
    """Return workers that are terminated at the end."""
    return [
        "Epoch 0:  50%|##    | 500/1000 [08:20<08:20,  1.0it/s, v_num=3]",
        "Epoch 0: 100%|######| 1000/1000 [16:40<00:00,  1.0it/s, v_num=3]",
        "`Trainer.fit` stopped: `max_steps=1000` reached.",
        "[rank: 1] Received SIGTERM: 15",
        "[rank: 3] Received SIGTERM: 15",
    ]


def elastic():
    """Return a worker group that was restarted and ended well."""
    return [
        "[rank0]: step 4 loss 2.10",
        "E0211 04:11:02.118 811 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 1 (pid: 911) of binary: /usr/bin/python",
        "[rank0]: step 3 loss 2.20",
        *(f"[rank0]: step {n} loss 2.{n:02d}" for n in range(4, 12)),
        "I0211 04:15:12.001 811 torch/distributed/elastic/agent/server/api.py:1010] [default] worker group successfully finished. Waiting 300 seconds for other agents to finish.",
        "I0211 04:15:12.004 811 torch/distributed/elastic/agent/server/api.py:1041] Done waiting for other agents. Elapsed: 0.0003 seconds",
    ]


def slurm():
    """Return an error of a tool in the prologue, and the accounting records."""
    return [
        "modprobe: FATAL: Module gdrdrv not found in directory /lib/modules/5.15.0",
        *(f"[rank0]: step {n} loss 2.{n:02d}" for n in range(1, 9)),
        "slurmstepd: error: common_file_write_content: unable to write 1 bytes to cgroup",
        "JobID  JobName  Partition  Account  AllocCPUS  State  ExitCode",
        "8812  pretrain  gpu  llm  512  COMPLETED  0:0",
        "8812.batch  batch  llm  64  COMPLETED  0:0",
    ]


def kubernetes():
    """Return a pull that was repeated, and pods that completed."""
    return [
        'Warning  Failed  40m  kubelet  Failed to pull image "reg/llm:7": context deadline exceeded',
        'Normal   Pulled  39m  kubelet  Successfully pulled image "reg/llm:7" in 41s',
        *(f"INFO step={n} loss=2.{n:02d} tokens/s=412331" for n in range(1, 9)),
        "12s  Normal  Completed  job/pretrain  Job completed",
        "pretrain-0   0/1     Completed   0          3h12m",
    ]


def tracked():
    """Return a tracker's thread that raised at interpreter exit."""
    return [
        *(f"iter {n} loss 3.0{n} ms 812" for n in range(1, 9)),
        "Finished training after 8 iterations.",
        "Exception in thread NetStatThr:",
        *STACK,
        "BrokenPipeError: [Errno 32] Broken pipe",
        "wandb: Waiting for W&B process to finish... (success).",
        "wandb: Find logs at: ./wandb/run-20260211/logs",
        "final exit code: 0",
    ]


def generated_programs():
    """Return a reward function that runs a model's programs, whose tracebacks are data."""
    lines = []
    for n in range(1, 7):
        lines += [
            *STACK,
            f"ZeroDivisionError: division by zero (program {n})",
            f"step:{n} - actor/loss:0.1{n}",
        ]
    return [*lines, "SUCC cli.py:66 -- Job 'raysubmit_a1' succeeded"]


def deepspeed():
    """Return overflows, and a process group that was not destroyed."""
    return [
        "[2026-02-11 04:11:01,410] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
        *(
            f"steps: {n} loss: 2.{n:02d} iter time (s): 2.871 samples/sec: 89.164"
            for n in range(1, 9)
        ),
        "[rank0]:[W211 04:11:40.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources.",
        *(
            f"[2026-02-11 04:11:4{n},300] [INFO] [launch.py:347:main] Process 90{n} exits successfully."
            for n in range(4)
        ),
    ]


def last_step_only():
    """Return a log without a statement of the end, but with its last step and a saved state."""
    return [
        "WARNING: could not import apex: ModuleNotFoundError: No module named 'apex'",
        *(f"update {n}/40 | loss 2.{n} | lr 1e-4" for n in range(30, 40)),
        "step 40/40 | loss 2.01 | lr 1e-4",
        "saved final checkpoint to /out/final",
    ]


ENDED_WELL = {
    one.__name__: one
    for one in (
        megatron, trainer_of_transformers, lightning, elastic, slurm, kubernetes, tracked, generated_programs,
        deepspeed, last_step_only,
    )
}  # fmt: skip
