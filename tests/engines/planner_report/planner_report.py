"""An engine's plugin that prints what a memory plan is held against: bytes of a rank's parameters, bytes of its KV pool.

For tests/engines/test_planner.py. Parameters are counted where a model was made and not filled yet; of what the engines keep
beside them (rotary tables) nothing is.
"""
import functools


def report(name, number):
    print("planner_report %s=%d" % (name, number), flush=True)


def counted(make):
    """Around a function that makes a model."""
    @functools.wraps(make)
    def made(*args, **kwargs):
        model = make(*args, **kwargs)
        report("weights_bytes", sum(each.numel() * each.element_size() for each in model.parameters()))
        return model
    return made


def sized(size):
    """Around a method that answers bytes for KV."""
    @functools.wraps(size)
    def answer(*args, **kwargs):
        found = size(*args, **kwargs)
        report("pool_bytes", found)
        return found
    return answer


def vllm():
    """vLLM calls it in each of its processes."""
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1.worker.cpu_worker import CPUWorker
    base_loader.initialize_model = counted(base_loader.initialize_model)
    CPUWorker.determine_available_memory = sized(CPUWorker.determine_available_memory)


def sglang():
    """SGLang calls it in each scheduler, and in processes that make no model."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_loader import loader
    loader._initialize_model = counted(loader._initialize_model)
    KVCacheConfigurator._profile_available_bytes = sized(KVCacheConfigurator._profile_available_bytes)
