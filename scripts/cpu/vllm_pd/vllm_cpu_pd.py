"""A vLLM plugin that lets the processes of a P/D pair sleep while they wait. For tests and the demo only.

A GPU's host has cores to burn, two cores have not. vLLM 0.32.0 polls in two places, and what is measured on two cores:

- NIXL's progress thread never waits between polls: a core for each worker, idle or not. With a pause it waits on its file
  descriptors and wakes when data comes: no CPU while idle, and 1 MiB is read in 1 to 8 ms as before (NIXL 1.5.1, TCP).
- For 1 s after each message the shared memory queues call sched_yield in a loop. Linux (6.18) defers a task for each call,
  so the worker that then has work to do gets no core: 5 to 28 s for one transfer. A nap costs its 0.2 ms and defers nobody.
"""
import sys
import time

PAUSE_MICROSECONDS = 10_000
NAP_SECONDS = 0.0002


def register():
    """The entry point; vLLM calls it in each of its processes. NIXL is imported later, by vLLM, and only if it is used."""
    from vllm.distributed import nixl_utils
    from vllm.distributed.device_communicators import shm_broadcast
    load = nixl_utils._load_nixl_attr

    def load_pausing(name):
        loaded = load(name)
        if name == "NixlWrapper" and loaded is not None:
            pause(sys.modules[loaded.__module__].nixlBind)
        return loaded
    nixl_utils._load_nixl_attr = load_pausing
    shm_broadcast.sched_yield = lambda: time.sleep(NAP_SECONDS)


def pause(bindings):
    """Makes the progress thread of every agent that is created from now on pause."""
    create = bindings.nixlAgent

    def create_pausing(name, config):
        config.pthrDelay = PAUSE_MICROSECONDS
        return create(name, config)
    bindings.nixlAgent = create_pausing
