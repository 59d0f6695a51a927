"""Exchange with other formats, and what differs between two checkpoints.

`dcp_export` and `dcp_import` (folders of `torch.distributed.checkpoint`), `huggingface_export` and
`huggingface_import` (safetensors with an index), `torch_dcp` (our format under torch's own save and load), `copy`
(ours to ours), `diff`. All stream: the memory they take does not grow with the model.
"""
