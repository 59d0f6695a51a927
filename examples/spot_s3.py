"""Pretrain on spot machines that are taken away with notice or without, with everything that must last on S3.

    pip install '.[s3,tensorboard]'                            # s3fs: the corpus is read from S3 too
    raysharded data pack my_texts/ s3://bucket/corpus/
    python examples/spot_s3.py s3://bucket/corpus/ s3://bucket/runs/ --cloud aws

Credentials are AWS's own: of the machine's role, the environment or ~/.aws. Another server is named in the URL, as in
`s3://bucket/runs/?endpoint_url=http://host:9000`. Start it again and it resumes, on any number of machines.
"""

from __future__ import annotations

import argparse

import torch

import raysharded as rs
from raysharded.demo.model import ByteGPT
from raysharded.metrics import TensorBoard


def trainer(
    corpus: str,
    storage: str,
    *,
    cloud: str = "aws",
    steps: int = 10_000,
    save_every: int = 100,
    workers: tuple[int, int] = (2, 8),
    logs: str = "tensorboard",
) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=ByteGPT(layers=4, seq_len=128, warmup_steps=steps // 20, total_steps=steps),
        data=rs.TokenDataset(corpus, seq_len=128),
        batch=rs.BatchConfig(global_batch_size=32, microbatch_size=2, seed=0),
        scaling=rs.ScalingConfig(
            num_workers=workers,
            spares=1,  # takes the place of a lost worker at once; costs a machine
            cpus_per_worker=0.5,
            use_gpu=torch.cuda.is_available(),
            start_timeout_s=1800.0,  # new spot machines may be long in coming
        ),
        run=rs.RunConfig(
            name="spot",
            storage_path=storage,
            max_steps=steps,
            checkpoint=rs.CheckpointConfig(
                every_steps=save_every,
                keep_last=2,
                keep_every=10 * save_every,  # of every so many steps one stays permanently
                grace_s=25.0,  # for one more checkpoint, when the driver gets SIGTERM
            ),
            failure=rs.FailureConfig(preemption_notices=(cloud,)),
            metrics=[TensorBoard(logs)],
        ),
        # Of every five workers one may be lost at once without a rollback, for a quarter of the state's memory.
        engine=rs.EngineConfig(redundancy=rs.Redundancy(parity=(4, 1))),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("storage")
    parser.add_argument("--cloud", choices=["aws", "gcp"], default="aws", help="who gives notice")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--logs", default="tensorboard", help="a folder for TensorBoard, on the driver's machine")
    given = parser.parse_args()
    result = trainer(given.corpus, given.storage, cloud=given.cloud, steps=given.steps, logs=given.logs).fit()
    print(f"{result.steps} steps, fingerprint {result.fingerprint}, checkpoint {result.checkpoint}")
    print(f"what happened: raysharded report '{result.url}'")
