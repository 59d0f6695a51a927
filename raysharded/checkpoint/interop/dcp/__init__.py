"""Folders, readers and writers of `torch.distributed.checkpoint`."""
