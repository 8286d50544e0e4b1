"""Types and names other than the code expects."""

from failure_lab.program import Program

_TYPES = (
    Program(
        id="type-unexpected-keyword",
        reason="TypeError",
        cause="A constructor does not take an argument of the configuration.",
        root=r"TypeError: .*unexpected keyword argument",
        ranks=2,
        dialect="titan",
        files={
            "model.json": """\
{"dim": 64, "n_layers": 2, "rope_scaling": 4.0}
"""
        },
        script="""
        import json


        class Transformer(nn.Module):
            def __init__(self, dim, n_layers):
                super().__init__()


        with open("model.json") as file:
            model = Transformer(**json.load(file))
        """,
    ),
    Program(
        id="type-collate-none",
        reason="TypeError",
        cause="The data set returns None for a broken sample.",
        root=r"TypeError: default_collate|Caught TypeError in DataLoader worker",
        accept_reasons=("DatasetLoadingError",),
        dialect="lightning",
        name="train_clip.py",
        script="""
        from torch.utils.data import DataLoader, Dataset


        class Images(Dataset):
            def __len__(self):
                return 32

            def __getitem__(self, index):
                return None if index == 20 else torch.zeros(3)


        loader = iter(DataLoader(Images(), batch_size=4, num_workers=1))
        for step in training(8):
            next(loader)
        """,
    ),
    Program(
        id="type-json-tensor",
        reason="TypeError",
        cause="A tensor was put into a JSON report.",
        root=r"TypeError: Object of type Tensor is not JSON serializable",
        ranks=2,
        faulty={"rank": 0},
        dialect="hf",
        name="sft_trainer.py",
        script="""
        import json

        for step in training(5):
            if step == 4 and RANK == 0:
                with open("trainer_state.json", "w") as file:
                    json.dump({"step": step, "loss": torch.tensor(2.1)}, file)
        """,
    ),
    Program(
        id="type-learning-rate-text",
        reason="TypeError",
        cause="YAML reads 3e-4 as text, and the optimizer compares it with a number.",
        root=r"TypeError: '<=' not supported",
        launcher="python",
        dialect="plain",
        name="train_vit.py",
        files={
            "vit.yaml": """\
lr: 3e-4
"""
        },
        script="""
        import yaml

        with open("vit.yaml") as file:
            optimizer = torch.optim.AdamW(build().parameters(), lr=yaml.safe_load(file)["lr"])
        """,
    ),
)

_NAMES = (
    Program(
        id="name-undefined",
        reason="NameError",
        cause="A function uses a name that was never set.",
        root=r"NameError: name 'scaler' is not defined",
        ranks=2,
        dialect="deepspeed",
        script="""
        for step in training(3):
            if step == 2:
                scaler.update()
        """,
    ),
    Program(
        id="name-unbound-local",
        reason="NameError",
        cause="A local variable is read before it is set.",
        root=r"UnboundLocalError: ",
        dialect="megatron",
        name="pretrain_bert.py",
        script="""
        def validate(step):
            if step > 100:
                best = 0.0
            return best


        for step in training(4):
            if step == 4:
                validate(step)
        """,
    ),
    Program(
        id="name-missing-import",
        reason="NameError",
        cause="A module was used that was never imported.",
        root=r"NameError: name 'math' is not defined",
        launcher="python",
        dialect="hf",
        name="train_whisper.py",
        files={
            "cosine.py": """\
def rate(step, total):
    return 0.5 * (1 + math.cos(math.pi * step / total))
"""
        },
        script="""
        from cosine import rate

        for step in training(2):
            rate(step, 100)
        """,
    ),
)

PROGRAMS = (
    *_TYPES,
    *_NAMES,
)
