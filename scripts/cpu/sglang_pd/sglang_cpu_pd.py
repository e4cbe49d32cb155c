"""A SGLang plugin that lets the prefill side of a P/D pair run on a CPU. For tests and the demo only.

Mooncake's sender takes page numbers in pinned memory and waits for them with a CUDA event (disaggregation/prefill.py,
`send_kv_chunk` of 0.5.23), which a CPU has neither of. Without the sender's offer to do so, SGLang takes its other branch,
which needs no device; the transfer itself is Mooncake's own.
"""
HOST_INDICES = "supports_host_tensor_indices"


def without_host_indices(kv_class, *args, **kwargs):
    """Takes the offer off the class that SGLang is about to make its senders of."""
    if getattr(kv_class, HOST_INDICES, False):
        setattr(kv_class, HOST_INDICES, False)


def register():
    """The entry point; SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", without_host_indices)
