"""Missing keys and positions."""

from failure_lab.program import Program

_KEYS = (
    Program(
        id="key-optimizer-state",
        reason="KeyError",
        cause="The checkpoint has no optimizer state.",
        root=r"KeyError: 'optimizer'",
        accept_reasons=("ModelLoadingError",),
        ranks=2,
        dialect="megatron",
        script="""
        join()
        torch.save({"model": build().state_dict(), "iteration": 4000}, f"rank{RANK}.pt")
        state = torch.load(f"rank{RANK}.pt")
        optimizer = torch.optim.AdamW(build().parameters())
        optimizer.load_state_dict(state["optimizer"])
        """,
    ),
    Program(
        id="key-batch-column",
        reason="KeyError",
        cause="A batch has no labels.",
        root=r"KeyError: 'labels'",
        dialect="hf",
        name="run_glue.py",
        files={
            "collate.py": """\
def targets(batch):
    return [row['labels'] for row in batch]
"""
        },
        script="""
        from collate import targets

        for step in training(4):
            if step == 3:
                targets([{"input_ids": [1, 2], "label": 0}])
        """,
    ),
    Program(
        id="key-environment",
        reason="KeyError",
        cause="An environment variable that the launcher sets elsewhere is not set.",
        root=r"KeyError: 'SLURM_PROCID'",
        launcher="python",
        dialect="lightning",
        name="slurm_train.py",
        script="""
        rank = int(os.environ["SLURM_PROCID"])
        """,
    ),
    Program(
        id="key-yaml-section",
        reason="KeyError",
        cause="A section is missing from the configuration.",
        root=r"KeyError: 'scheduler'",
        ranks=3,
        dialect="titan",
        prefix="[rank${rank}]:",
        files={
            "train.yaml": """\
optimizer:
  lr: 0.0003
model:
  layers: 2
"""
        },
        script="""
        import yaml


        def read():
            with open("train.yaml") as file:
                return yaml.safe_load(file)


        def schedule(config):
            return config["scheduler"]["warmup_steps"]


        join()
        print("warmup:", schedule(read()))
        """,
    ),
)

_POSITIONS = (
    Program(
        id="index-embedding",
        reason="IndexError",
        cause="A token lies beyond the vocabulary.",
        root=r"IndexError: index out of range in self",
        ranks=2,
        faulty={"rank": 1},
        dialect="plain",
        name="train_lm.py",
        script="""
        table = nn.Embedding(1000, 16)
        for step in training(5):
            tokens = torch.randint(0, 1000, (4, 8))
            if step == 4 and RANK == 1:
                tokens[0, 0] = 50257
            table(tokens)
        """,
    ),
    Program(
        id="index-list",
        reason="IndexError",
        cause="There are fewer shards than the sampler asks for.",
        root=r"IndexError: list index out of range",
        dialect="megatron",
        files={
            "blending.py": """\
def pick(shards, step):
    return shards[step * 2]
"""
        },
        script="""
        from blending import pick

        shards = [f"shard{number}" for number in range(6)]
        for step in training(8):
            pick(shards, step)
        """,
    ),
    Program(
        id="index-dimension",
        reason="IndexError",
        cause="A reduction over a dimension that the tensor does not have.",
        root=r"IndexError: Dimension out of range",
        launcher="python",
        dialect="deepspeed",
        name="train_rlhf.py",
        script="""
        for step in training(3):
            rewards = torch.randn(8, 16)
            if step == 2:
                rewards.mean(dim=2)
        """,
    ),
    Program(
        id="index-dataset-row",
        reason="IndexError",
        cause="A row beyond the end of the data set is asked for.",
        root=r"IndexError: .*out of (?:bounds|range)",
        ranks=2,
        dialect="hf",
        name="grpo.py",
        script="""
        from datasets import Dataset

        rows = Dataset.from_dict({"text": ["a"] * 12})
        for step in training(4):
            if step == 3:
                rows[12]
        """,
    ),
)

PROGRAMS = (
    *_KEYS,
    *_POSITIONS,
)
