"""Keep the definition of an evaluation in its folder, so that the evaluation can be resumed."""

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger.records import EvaluationRecord
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.coordinator.config import CoordinatorConfig
from holdfast.evaluate.run.options import EvaluateOptions, options_of
from holdfast.evaluate.run.session import NodesNeeded
from holdfast.evaluate.types.engine import WITHOUT_WEIGHTS, uses_gpus
from holdfast.evaluate.types.model_manifest import ModelManifest
from holdfast.evaluate.types.suite import Suite
from holdfast.evaluate.wire.messages import AddModel


def new_id(model: str) -> str:
    """Return a new id for an evaluation, from the last part of the model's path and the time."""
    name = (
        re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rsplit("/", 1)[-1]).strip("-._")
        or "model"
    )
    return f"{name[:40]}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(2).hex()}"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Define an evaluation, as it is recorded in the evaluation's folder."""

    suite: Suite
    model: str
    manifest: ModelManifest | None
    options: EvaluateOptions
    directory: str = ""
    """The folder in which the command was called; tasks may name their data relative to it."""

    def write(self, paths: EvaluationPaths) -> None:
        """Write the plan, so that the evaluation can be resumed.

        The suite's file is written last: it shows that the plan is complete.
        """
        options = {**self.options.to_json(), "evaluation_id": paths.evaluation_id}
        fields = {"model": self.model, "options": options, "directory": self.directory}
        write_atomic(paths.state / "asked.json", json.dumps(fields, indent=1).encode())
        write_atomic(paths.state / "manifest", msgspec.msgpack.encode(self.manifest))
        write_atomic(paths.suite, msgspec.json.format(msgspec.json.encode(self.suite)))

    @classmethod
    def read(cls, paths: EvaluationPaths) -> "Planned":
        """Read the plan of an evaluation.

        Raises:
            NotFound: the evaluation does not exist.
        """
        if not paths.suite.exists():
            raise NotFound(
                f"There is no evaluation {paths.evaluation_id!r}. `holdfast eval ls` lists those "
                "there are."
            )
        fields = json.loads((paths.state / "asked.json").read_bytes())
        return cls(
            suite=msgspec.json.decode(paths.suite.read_bytes(), type=Suite),
            model=fields["model"],
            manifest=msgspec.msgpack.decode(
                (paths.state / "manifest").read_bytes(), type=ModelManifest | None
            ),
            options=options_of(fields["options"]),
            directory=fields.get("directory", ""),
        )

    @property
    def family(self) -> str:
        """The family of models whose recorded costs are used.

        This is the family in the options; without one, a name derived from the model's shape.
        """
        return self.options.family or _family(self.model, self.manifest)

    def record(self, paths: EvaluationPaths) -> EvaluationRecord:
        """Return the evaluation's first record for the ledger."""
        return EvaluationRecord(
            evaluation_id=paths.evaluation_id,
            suite=self.suite.name,
            model=self.model,
            family=self.family,
            state="running",
            started_at_s=time.time(),
            folder=str(paths.root),
            mode=self.options.engine.mode,
            run_id=self.options.run_id,
            step=self.options.step,
        )

    def add_model(self, number: int, paths: EvaluationPaths) -> AddModel:
        """Return the message that adds the model to the coordinator.

        For a checkpoint, the config and tokenizer are written to the evaluation's folder.
        """
        tokenizer = ""
        if self.manifest is not None and self.manifest.form == "dcp":
            folder = paths.state / "tokenizer"
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in self.manifest.hf_config.items():
                write_atomic(folder / name, content)
            tokenizer = str(folder)
        elif self.manifest is not None and Path(self.manifest.source).is_dir():
            tokenizer = self.manifest.source
        return AddModel(
            model=number,
            name=self.model,
            manifest=self.manifest,
            folder=str(paths.root),
            tokenizer=tokenizer,
        )

    def coordinator_config(self, paths: EvaluationPaths) -> CoordinatorConfig:
        """Return the coordinator's configuration."""
        options = self.options
        return CoordinatorConfig(
            evaluation_id=paths.evaluation_id,
            suite=self.suite,
            spec=options.engine,
            engines_per_node=options.engines_per_node,
            nodes=options.nodes,
            folder=str(paths.root),
            journals=str(paths.answers),
            listen_host="127.0.0.1"
            if options.on == "local"
            else "0.0.0.0",  # connections need the token
            metric_slots=options.metric_slots,
            linger_s=options.linger_s,
            silent_s=options.silent_s,
            max_read_mib_s=options.max_read_mib_s,
            drop_stale=options.drop_stale,
        )

    def nodes_wanted(self, environment: Mapping[str, str]) -> NodesNeeded:
        """Describe the nodes on which agents run, and the environment of their harness hosts."""
        options = self.options
        return NodesNeeded(
            on=options.on,
            nodes=options.nodes,
            gpus_per_node=self.gpus_per_node,
            sbatch_options=options.sbatch_options,
            environment=environment,
            note=self.note_of_devices,
        )

    @property
    def gpus_per_node(self) -> int:
        """The number of GPUs to request on each node.

        0 if engines need no GPUs, or if the sbatch options already request them.
        """
        options, spec = self.options, self.options.engine
        if not uses_gpus(spec) or any(map(_requests_gpus, options.sbatch_options)):
            return 0
        needs_them = spec.kind == "vllm" or spec.device.startswith("cuda")
        return spec.tensor_parallel * (options.engines_per_node or 1) if needs_them else 0

    @property
    def note_of_devices(self) -> str:
        """A warning if the engines would run without GPUs by mistake; otherwise empty."""
        spec = self.options.engine
        if self.options.on != "ray" or spec.kind != "hf" or spec.device:
            return ""
        return (
            "Ray only gives GPUs that were requested, so the engines run on CPUs. Give "
            "--device cuda for one on "
            "each node (--engines-per-node N for more), or --device cpu if that is meant."
        )


def _requests_gpus(sbatch_option: str) -> bool:
    """Return True if an sbatch option requests GPUs; `--exclusive` does too (sbatch(1))."""
    if sbatch_option.startswith(("--gres", "--tres")):
        return "gpu" in sbatch_option
    return sbatch_option.startswith(("--gpus", "-G")) or sbatch_option == "--exclusive"


def describe_model(model: str, options: EvaluateOptions) -> ModelManifest | None:
    """Describe the files of a model; None if the engines already have the model.

    Raises:
        BadUse: the model does not exist, or cannot be evaluated.
    """
    if options.engine.kind in WITHOUT_WEIGHTS:
        return None
    from holdfast.evaluate.weights.describe import describe

    manifest = describe(
        model,
        hf_config=str(options.hf_config) if options.hf_config else None,
        name_map=str(options.name_map) if options.name_map else None,
        base=options.base,
    )
    if manifest.adapter and options.engine.kind != "hf":
        raise BadUse(
            f"{model} is a PEFT adapter, which the engine hf applies and {options.engine.kind} "
            "does not. Give --engine hf, or merge the adapter into its base (merge_and_unload)."
        )
    return manifest


def _family(model: str, manifest: ModelManifest | None) -> str:
    """Name the family of a model by its type, width and depth, since equal shapes cost the same.

    If the model's config cannot be read, the family is the model's name.
    """
    config = None
    if manifest is not None and manifest.form == "dcp":
        config = manifest.hf_config.get("config.json")
    elif manifest is not None and (path := Path(manifest.source) / "config.json").is_file():
        config = path.read_bytes()
    if config is None:
        return model.rstrip("/").rsplit("/", 1)[-1]
    fields = json.loads(config)
    shape = [fields.get("model_type", "model")]
    shape += [
        str(fields[name])
        for name in ("hidden_size", "n_embd", "num_hidden_layers", "n_layer")
        if name in fields
    ]
    return "-".join(shape)
