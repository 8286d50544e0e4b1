"""Object storage that refuses, is slow, or is missing; every request is real."""

from failure_lab.program import Program

_KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "2",
}

PROGRAMS = (
    Program(
        id="s3-upload-denied",
        reason="S3StorageError",
        cause="The role may not put objects into the checkpoint bucket: 403 AccessDenied.",
        root=r"An error occurred \(AccessDenied\)",
        accept_reasons=("PermissionError",),
        faulty={"rank": 0},
        ranks=2,
        dialect="megatron",
        needs=("s3",),
        environment=_KEYS,
        script="""
        import io

        import boto3

        bucket = boto3.client("s3")
        for step in training(6):
            if step == 4 and RANK == 0:
                body = io.BytesIO()
                torch.save({"step": step}, body)
                bucket.put_object(Bucket="denied", Key=f"iter_{step:07d}/model.pt", Body=body.getvalue())
        """,
    ),
    Program(
        id="s3-data-key-missing",
        reason="S3StorageError",
        cause="A shard of the data set is not in the bucket: 404.",
        root=r"An error occurred \(NoSuchKey\)",
        accept_reasons=("FileNotFoundError", "DatasetLoadingError"),
        ranks=2,
        dialect="titan",
        prefix="[rank${rank}]:",
        needs=("s3",),
        environment=_KEYS,
        files={
            "shards.py": """\
import boto3


class Shards:
    def __init__(self, bucket):
        self._bucket, self._client = bucket, boto3.client("s3")

    def open(self, number):
        return self._client.get_object(Bucket=self._bucket, Key=f"c4/shard-{number:05d}.jsonl.zst")["Body"]
""",
        },
        script="""
        from shards import Shards

        shards = Shards("empty")
        for step in training(4):
            if step == 2:
                shards.open(31 + RANK)
        """,
    ),
    Program(
        id="s3-read-timeout",
        reason="S3StorageError",
        cause="The endpoint accepts requests and never answers.",
        root=r"ReadTimeoutError: Read timeout on endpoint|exceptions\.ReadTimeoutError|TimeoutError: timed out",
        accept_reasons=("NetworkError", "ConnectionError"),
        restart_helps=True,
        dialect="deepspeed",
        name="pretrain.py",
        needs=("s3",),
        environment=_KEYS,
        script="""
        import boto3
        from botocore.config import Config

        client = boto3.client("s3", config=Config(read_timeout=2, connect_timeout=2, retries={"max_attempts": 1}))
        for step in training(3):
            if step == 2:
                client.download_file("hung", "checkpoints/latest", "latest")
        """,
    ),
    Program(
        id="s3-slow-down",
        reason="S3StorageError",
        cause="The bucket is asked too much at once: 503 SlowDown after every retry.",
        root=r"An error occurred \(SlowDown\)",
        restart_helps=True,
        faulty={"rank": 1},
        ranks=2,
        dialect="hf",
        name="run_clm.py",
        needs=("s3",),
        environment=_KEYS,
        script="""
        import logging

        import boto3

        logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
        for step in training(5):
            if step == 5 and RANK == 1:
                boto3.client("s3").put_object(Bucket="slow", Key="runs/7b/optimizer_1.pt", Body=b"0" * 4096)
        """,
    ),
    Program(
        id="s3-endpoint-unreachable",
        reason="S3StorageError",
        cause="Nothing listens at the address of the storage endpoint.",
        root=r"EndpointConnectionError|NewConnectionError|ConnectionRefusedError: ",
        accept_reasons=("ConnectionError", "NetworkError"),
        restart_helps=True,
        launcher="python",
        name="convert_checkpoint.py",
        dialect="plain",
        environment={**_KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
        script="""
        import boto3

        for step in training(2):
            pass
        boto3.client("s3").upload_file(__file__, "models", "llama/consolidated.00.pth")
        """,
    ),
    Program(
        id="s3-arrow-head-denied",
        reason="S3StorageError",
        cause="Arrow's S3 file system is refused the key it was given.",
        root=r"AWS Error",
        accept_reasons=("OSError", "PermissionError"),
        dialect="lightning",
        name="fit.py",
        needs=("s3",),
        environment=_KEYS,
        script="""
        import pyarrow.fs
        import pyarrow.parquet

        endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        store = pyarrow.fs.S3FileSystem(endpoint_override=endpoint, scheme="http", region="us-east-1")
        for step in training(3):
            pass
        with store.open_input_file("badkey/tokens/part-00003.parquet") as file:
            pyarrow.parquet.read_table(file)
        """,
    ),
    Program(
        id="s3-no-credentials",
        reason="S3StorageError",
        cause="No credentials for the object store were found.",
        root=r"NoCredentialsError: ",
        ranks=2,
        dialect="megatron",
        prefix="[default${local_rank}]:",
        name="pretrain_gpt.py",
        needs=("s3",),
        environment={
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_SHARED_CREDENTIALS_FILE": "none",
            "AWS_CONFIG_FILE": "none",
        },
        script="""
        import boto3

        join()
        print("loading the data blend from s3://corpora", flush=True)
        boto3.client("s3").list_objects_v2(Bucket="corpora", Prefix="en/")
        """,
    ),
)
