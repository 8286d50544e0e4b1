"""Models and checkpoints that cannot be loaded."""

from failure_lab.program import Program

PROGRAMS = (
    Program(
        id="model-size-mismatch",
        reason="ModelLoadingError",
        cause="The checkpoint has another width than the model.",
        root=r"Error\(s\) in loading state_dict|size mismatch for",
        accept_reasons=("RuntimeError",),
        ranks=2,
        dialect="hf",
        name="resume.py",
        script="""
        torch.save(nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16)).state_dict(), f"model_{RANK}.pt")
        model = build()
        model.load_state_dict(torch.load(f"model_{RANK}.pt"))
        for step in training(3, model=model):
            pass
        """,
    ),
    Program(
        id="model-missing-keys",
        reason="ModelLoadingError",
        cause="The checkpoint was saved from a wrapped model, so every key has another name.",
        root=r"Error\(s\) in loading state_dict|(?:Missing|Unexpected) key\(s\) in state_dict",
        accept_reasons=("RuntimeError", "KeyError"),
        launcher="python",
        dialect="lightning",
        name="evaluate_checkpoint.py",
        script="""
        class Wrapped(nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module


        torch.save(Wrapped(build()).state_dict(), "last.ckpt")
        Wrapped(Wrapped(build())).load_state_dict(torch.load("last.ckpt", map_location="cpu"), strict=True)
        """,
    ),
    Program(
        id="model-safetensors-header",
        reason="ModelLoadingError",
        cause="A safetensors file is broken: its header makes no sense.",
        root=r"SafetensorError",
        dialect="titan",
        ranks=2,
        prefix="[rank${rank}]:",
        files={
            "model-00002-of-00004.safetensors": b"version https://git-lfs.github.com/spec/v1\nsize 4943178720\n"
        },
        script="""
        from safetensors.torch import load_file

        join()
        weights = load_file("model-00002-of-00004.safetensors")
        """,
    ),
    Program(
        id="model-truncated-archive",
        reason="ModelLoadingError",
        cause="The checkpoint was cut short while it was written.",
        root=r"PytorchStreamReader failed",
        accept_reasons=("RuntimeError",),
        ranks=2,
        faulty={"rank": 1},
        dialect="megatron",
        script="""
        path = f"mp_rank_{RANK:02d}_model_states.pt"
        torch.save(build().state_dict(), path)
        if RANK == 1:
            os.truncate(path, os.path.getsize(path) // 2)
        for step in training(2):
            pass
        print(f" loading checkpoint from {path} at iteration 5000", flush=True)
        torch.load(path, weights_only=True)
        for step in training(2, first=3):
            pass
        """,
    ),
    Program(
        id="model-weights-only",
        reason="ModelLoadingError",
        cause="The checkpoint holds an object that a load of weights only does not allow.",
        root=r"UnpicklingError: |Weights only load failed|WeightsUnpickler error",
        launcher="python",
        dialect="deepspeed",
        name="serve_checkpoint.py",
        files={
            "legacy.py": """\
class TrainerState:
    def __init__(self):
        self.epoch = 3
"""
        },
        script="""
        from legacy import TrainerState

        torch.save({"model": build().state_dict(), "state": TrainerState()}, "epoch3.pth")
        torch.load("epoch3.pth")
        """,
    ),
    Program(
        id="model-no-weights-in-folder",
        reason="ModelLoadingError",
        cause="The model's folder has a configuration and no weights.",
        root=r"OSError: Error no file named|no file named .* found in directory",
        accept_reasons=("OSError", "FileNotFoundError"),
        dialect="hf",
        name="run_dpo.py",
        ranks=2,
        files={
            "base/config.json": """\
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
 "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
""",
        },
        script="""
        from transformers import AutoModelForCausalLM

        join()
        model = AutoModelForCausalLM.from_pretrained("base")
        """,
    ),
    Program(
        id="model-unknown-type",
        reason="ModelLoadingError",
        cause="The configuration does not say which model it is of.",
        root=r"ValueError: (?:Unrecognized model|The checkpoint you are trying to load)|KeyError: 'llama9_next'",
        accept_reasons=("ValueError",),
        launcher="python",
        dialect=None,
        name="export.py",
        files={
            "ckpt/config.json": """\
{"hidden_size": 64, "model_type": "llama9_next"}
"""
        },
        script="""
        from transformers import AutoConfig

        print("exporting ckpt to bf16 shards", flush=True)
        AutoConfig.from_pretrained("ckpt")
        """,
    ),
)
