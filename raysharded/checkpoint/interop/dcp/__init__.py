"""`torch.distributed.checkpoint` (DCP): import and export its folders, and use the raysharded format in its calls.

    torch.distributed.checkpoint.save(state, storage_writer=RayshardedWriter("s3://bucket/run/step-500"))
    torch.distributed.checkpoint.load(state, storage_reader=RayshardedReader("s3://bucket/run/step-500"))

One changed line gives a script the commit, the digests and fast storage. It works with torch 2.13 to 2.15, also with
`async_save`. Every rank writes its data files; the coordinator commits the manifest when all ranks have written. Values
that are not tensors are kept as JSON in the manifest: nothing is pickled to storage.
"""
