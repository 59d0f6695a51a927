"""`torch.distributed.checkpoint` (DCP): its folders imported and exported, and our format under its own calls.

    torch.distributed.checkpoint.save(state, storage_writer=RayshardedWriter("s3://bucket/run/step-500"))
    torch.distributed.checkpoint.load(state, storage_reader=RayshardedReader("s3://bucket/run/step-500"))

So one changed line gives a script the commit, the digests and fast storage. For torch 2.13 to 2.15, also with
`async_save`. Every rank writes one data file; the coordinator commits the manifest when all have been written. What is
no tensor is kept as JSON in the manifest: nothing is pickled to storage.
"""
