"""Templates of lines of healthy and dying jobs by trainer, which `noise` fills.

`{step}`, `{rank}`, `{node}` and other fields are drawn anew for each line.
"""

# ruff: noqa: E501  (lines of logs stand as they are printed)

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The routine of one trainer's jobs."""

    start: tuple[str, ...]
    """Printed once, in this order."""
    step: str
    """Printed at every step."""
    chatter: tuple[str, ...]
    """Printed at any time."""
    recovered: tuple[tuple[str, ...], ...]
    """Errors after which training goes on, each some lines."""


LIBRARY = (
    "{node}:{pid}:{tid} [{local}] NCCL INFO Channel {small:02d}/0 : {rank}[{local}] -> {peer}[{local}] [send] via NET/IB/{local}/GDRDMA",
    "{node}:{pid}:{tid} [{local}] NCCL INFO comm 0x55ac{tid:08x} rank {rank} nranks 64 cudaDev {local} busId {local}b000 - Init COMPLETE",
    "{node}:{pid}:{tid} [{local}] NCCL INFO NVLS multicast support is available on dev {local}",
    (
        "[rank{rank}]: /opt/venv/lib/python3.11/site-packages/torch/autograd/graph.py:829: UserWarning: c10d::allreduce_: an autograd"
        " kernel was not registered to the Autograd key(s)."
    ),
    "[rank{rank}]:W0314 {clock}.{micro:06d} {pid} torch/_dynamo/convert_frame.py:906] [0/8] torch._dynamo hit config.recompile_limit (8)",
    (
        "[rank{rank}]:/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py:624: UserWarning: This DataLoader will create"
        " 12 worker processes in total. Our suggested max number of worker in current system is 8."
    ),
)
"""Lines that libraries print under every trainer."""

RECOVERED = (
    (
        (
            "{date} {clock} WARNING storage: attempt 1/5 failed: ReadTimeoutError(\"HTTPSConnectionPool(host='storage', port=443): Read timed"
            ' out. (read timeout=60)"), retrying in 2.0 s'
        ),
        "{date} {clock} INFO storage: attempt 2/5 succeeded",
    ),
    (
        "[rank{rank}]: Traceback (most recent call last):",
        '[rank{rank}]:   File "/opt/trainer/logging/wandb_sink.py", line 88, in flush',
        "[rank{rank}]:     self._run.log(record)",
        "[rank{rank}]: requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='api.tracker.local', port=443): Read timed out.",
        "[rank{rank}]: tracking is off for this interval; training continues",
    ),
    (
        "{node} kernel: [{tid}.{micro:06d}] EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (corrected)",
        "{node} kernel: [{tid}.{micro:06d}] mce: [Hardware Error]: Corrected error, no action required.",
    ),
    (
        (
            "WARNING: sample {tid} of shard {small} could not be decoded: UnicodeDecodeError: 'utf-8' codec can't decode byte 0x8b in"
            " position 1: invalid start byte; skipped"
        ),
    ),
    (
        "{node}:{pid}:{tid} [{local}] NCCL WARN NET/IB : mlx5_{local}:1 Got async event : GID table change",
        "{node}:{pid}:{tid} [{local}] NCCL INFO NET/IB : mlx5_{local}:1 recovered, resuming",
    ),
    (
        "[rank{rank}]: FileNotFoundError: [Errno 2] No such file or directory: '/cache/index-{small}.npy'",
        "[rank{rank}]: index {small} is not in the cache: built anew in 3.1 s",
    ),
)
"""Recovered errors of every trainer."""

NOISE: Mapping[str, Noise] = {
    "megatron": Noise(
        start=(
            "using world size: 64, data-parallel size: 8, tensor-model-parallel size: 4, pipeline-model-parallel size: 2",
            "------------------------ arguments ------------------------",
            "  accumulate_allreduce_grads_in_fp32 .............. True",
            "  exit_on_missing_checkpoint ...................... True",
            "  error_injection_rate ............................ 0",
            "  distributed_timeout_minutes ..................... 10",
            "-------------------- end of arguments ---------------------",
            "> initializing torch distributed ...",
            "> setting random seeds to 1234 ...",
            " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 3464527872",
        ),
        step=" [{date} {clock}] iteration {step:8d}/  500000 | consumed samples: {samples:12d} | elapsed time per iteration (ms): {ms} |"
        " learning rate: 1.499823E-04 | global batch size:  1024 | lm loss: {loss}E+00 | loss scale: 1.0 | grad norm: 0.{small:03d} |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |",
        chatter=(
            "(min, max) time across ranks (ms):",
            "    forward-backward ...............................: ({ms}, {ms})",
            "    optimizer ......................................: (88.13, 90.{small:02d})",
            "[Rank {rank}] (after {step} iterations) memory (MB) | allocated: 48213.6 | max allocated: 61022.9 | reserved: 66038.0",
            "  successfully saved checkpoint from iteration {step:7d} to /ckpt/gpt-7b [ t 1/4, p 1/2 ]",
        ),
        recovered=(
            (
                "WARNING: a rerun of iteration {step} on rank {rank} gave the same loss; the result is accepted",
            ),
            (
                "could not find the metadata file /ckpt/gpt-7b/latest_checkpointed_iteration.txt",
                "    will not load any checkpoints and will start from random",
            ),
        ),
    ),
    "titan": Noise(
        start=(
            "[titan] {date} {clock},118 - root - INFO - Starting job: Llama 3 8B training",
            "[titan] {date} {clock},340 - root - INFO - Building 1-D device mesh with ['dp_shard'], [64]",
            "[titan] {date} {clock},871 - root - INFO - CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory",
            "[titan] {date} {clock},902 - root - INFO - Applied FSDP to the model",
            "[titan] {date} {clock},977 - root - WARNING - Peak flops undefined for: this device, fallback to A100",
        ),
        step="[rank{rank}]:[titan] {date} {clock},204 - root - INFO - step: {step:2d}  loss: {loss}  grad_norm: 0.{small:04d}  memory:"
        " 47.28GiB(59.74%)  tps: 6,{small:03d}  tflops: 351.{small:02d}  mfu: 35.51%",
        chatter=(
            "[rank{rank}]:[titan] {date} {clock},612 - root - INFO - [GC] Performing periodic GC collection took 0.0{small:02d} seconds",
            "[rank{rank}]:[titan] {date} {clock},033 - root - INFO - Saving the checkpoint (or staging if async is enabled).",
            "[rank{rank}]:[titan] {date} {clock},440 - root - INFO - Finished saving the checkpoint in {ms} ms",
        ),
        recovered=(
            (
                "[rank{rank}]:[titan] {date} {clock},771 - root - WARNING - Dataset c4 is being re-looped",
                (
                    "[rank{rank}]:[titan] {date} {clock},790 - root - WARNING - Failed to upload metrics: ConnectionError; will retry at the"
                    " next interval"
                ),
            ),
        ),
    ),
    "hf": Noise(
        start=(
            "[INFO|configuration_utils.py:763] {date} {clock},512 >> loading configuration file config.json from cache",
            "[INFO|modeling_utils.py:3982] {date} {clock},831 >> loading weights file model.safetensors from cache",
            "Loading checkpoint shards: 100%|██████████| 4/4 [00:09<00:00,  2.31s/it]",
            "[INFO|trainer.py:2414] {date} {clock},220 >> ***** Running training *****",
            "[INFO|trainer.py:2415] {date} {clock},220 >>   Num examples = 1,204,118",
        ),
        step="{{'loss': {loss}, 'grad_norm': 1.{small:03d}, 'learning_rate': 4.{small:02d}e-05, 'epoch': 0.{small:02d}}}",
        chatter=(
            "  {small}%|██▍       | {step}/5000 [41:1{digit}<2:11:42,  1.58s/it]",
            "[INFO|trainer.py:3945] {date} {clock},101 >> Saving model checkpoint to output/checkpoint-{step}",
            "[INFO|tokenization_utils_base.py:2500] {date} {clock},117 >> tokenizer config file saved in output/checkpoint-{step}",
            "Token indices sequence length is longer than the specified maximum sequence length for this model ({tid} > 4096).",
        ),
        recovered=(
            (
                (
                    "[WARNING|trainer.py:1402] {date} {clock},330 >> Could not estimate the number of tokens of the input, floating-point"
                    " operations will not be computed"
                ),
            ),
            (
                (
                    "'(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url\"))' thrown while"
                    " requesting HEAD https://huggingface.co/base/resolve/main/config.json"
                ),
                "Retrying in 1s [Retry 1/5].",
            ),
        ),
    ),
    "deepspeed": Noise(
        start=(
            "[{date} {clock},104] [INFO] [real_accelerator.py:222:get_accelerator] Setting ds_accelerator to cuda (auto detect)",
            "[{date} {clock},833] [INFO] [comm.py:652:init_distributed] cdb=None",
            "[{date} {clock},020] [INFO] [config.py:1001:print]   zero_enabled ................. True",
            "[{date} {clock},021] [INFO] [config.py:1001:print]   loss_scale ................... 0",
            "[{date} {clock},021] [INFO] [config.py:1001:print]   dump_state ................... False",
        ),
        step="[{date} {clock},551] [INFO] [logging.py:107:log_dist] [Rank 0] step={step}, skipped=0, lr=[9.65e-06], mom=[(0.9, 0.95)]",
        chatter=(
            "steps: {step} loss: {loss} iter time (s): 2.{small:03d} samples/sec: 89.{small:03d}",
            "[{date} {clock},732] [INFO] [timer.py:264:stop] epoch=0/micro_step={step}/global_step={step}, RunningAvgSamplesPerSec=88.{small}",
            "{node}: [{date} {clock},118] [INFO] [torch_checkpoint_engine.py:21:save] [Torch] Saving global_step{step}/mp_rank_0{local}.pt...",
        ),
        recovered=(
            (
                (
                    "[{date} {clock},410] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank {rank} Skipping step. Attempted"
                    " loss scale: 65536, reducing to 32768"
                ),
            ),
            (
                (
                    "[{date} {clock},900] [WARNING] [stage3.py:2118:step] {small} pytorch allocator cache flushes since last step. this happens"
                    " when there is high memory pressure and is detrimental to performance."
                ),
            ),
        ),
    ),
    "lightning": Noise(
        start=(
            "GPU available: True (cuda), used: True",
            "TPU available: False, using: 0 TPU cores",
            "Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {peer}/64",
            "  | Name    | Type             | Params | Mode",
            "0 | encoder | VisionTransformer | 303 M  | train",
        ),
        step="Epoch 0:  {small}%|████▏     | {step}/12500 [1:0{digit}:12<12:02,  1.71it/s, v_num=3, train_loss={loss}]",
        chatter=(
            "Validation DataLoader 0: 100%|██████████| 32/32 [00:11<00:00,  2.8{digit}it/s]",
            "Epoch 0, global step {step}: 'val_loss' reached {loss} (best {loss}), saving model to 'ckpt/step={step}.ckpt' as top 1",
            "Epoch 0, global step {step}: 'val_loss' was not in top 1",
        ),
        recovered=(
            (
                (
                    "/opt/venv/lib/python3.11/site-packages/lightning/pytorch/trainer/connectors/data_connector.py:425: The 'val_dataloader' does"
                    " not have many workers which may be a bottleneck."
                ),
            ),
            (
                "Skipping batch {step}: PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f21{pid}>",
            ),
        ),
    ),
}

CASCADE = (
    (
        "[rank{rank}]: Traceback (most recent call last):",
        '[rank{rank}]:   File "/opt/trainer/loop.py", line 412, in train_step',
        "[rank{rank}]:     dist.all_reduce(total_norm, group=group)",
        "[rank{rank}]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank {rank}.",
    ),
    (
        "W0314 {clock}.{micro:06d} {pid} torch/distributed/elastic/multiprocessing/api.py:900] Sending process {tid} closing signal SIGTERM",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process {pid} got signal: 15",
    ),
    (
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "srun: error: {node}: task {rank}: Terminated",
    ),
    (
        (
            "[rank{rank}]:[W314 {clock}.{micro:06d} ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before"
            " program exit, which can leak resources."
        ),
    ),
    (
        "{node}:{pid}:{tid} [{local}] NCCL INFO [Service thread] Connection closed by localRank {local}",
    ),
)
"""Last lines of a job, whatever the cause; none of these groups states the cause."""
