# One engine and its supervisor: the engine's own image, tightrank beside it under /opt/tightrank, the adapter on top.
#
#   ENGINE_IMAGE  what to put the supervisor on: the official image of an engine, pinned to what you have tested
#                 (docker image inspect --format '{{index .RepoDigests 0}}' NAME prints NAME@sha256:...), or the word
#                 `cpu`: an engine on the CPU and a tiny model, made here by scripts/setup. Its python3 is 3.11 or later.
#   ENGINE, BASE, WHEELS   for `cpu` only: sglang or vllm; what to build on; an image whose / has wheels for pip to find
#                 besides its index. PyTorch's CPU build comes from PyTorch's own index, or, where that is not reached or
#                 PIP_EXTRA_INDEX_URL names another, from there and from these wheels.
ARG ENGINE_IMAGE=vllm/vllm-openai:v0.32.0
ARG BASE=debian:bookworm-slim
ARG WHEELS=scratch

FROM ${WHEELS} AS wheels

FROM ${BASE} AS cpu
ARG ENGINE=sglang
ARG PIP_EXTRA_INDEX_URL
# What SGLang's transfer library is linked against comes with no package of Python: libcurl, libibverbs, libnuma, libstdc++.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
        libcurl4 libibverbs1 libnuma1 libstdc++6 \
    && rm -rf /var/lib/apt/lists/*
COPY scripts/setup /opt/engine/scripts/
COPY scripts/requirements/${ENGINE}.txt /opt/engine/scripts/requirements/
COPY scripts/cpu /opt/engine/scripts/cpu
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=cache,target=/root/.cache/pip \
    TIGHTRANK_CACHE=/opt/engine PIP_FIND_LINKS=/wheels python3 /opt/engine/scripts/setup ${ENGINE} models \
    && cp -rL /opt/engine/models/dense /model
ENV PATH=/opt/engine/envs/${ENGINE}/bin:$PATH

FROM ${ENGINE_IMAGE} AS engine
USER root

# An environment of its own: nothing is added to the engine's site-packages, and PYTHONPATH stays as it is.
FROM engine AS supervisor
COPY pyproject.toml scripts/requirements/supervisor.txt docker/environment.py /build/
RUN --mount=type=cache,target=/root/.cache/pip python3 /build/environment.py /opt/tightrank nvidia
COPY supervisor/tightrank /opt/tightrank/supervisor/tightrank
COPY docker/health.py /opt/tightrank/
# unchecked-hash: the files never change, so no look at them is needed, and no time stamp makes two builds differ.
RUN /opt/tightrank/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/tightrank/supervisor

# Compiled by the interpreter that will import it: the engine's.
FROM engine AS adapter
COPY adapter/inject /opt/tightrank/adapter/inject
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/tightrank/adapter

FROM engine
# The user has a name (PyTorch asks for it) and a home that is a volume: the engine's caches lie in it, Inductor's too, whose
# own choice is /tmp.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/cache/tightrank --shell /usr/sbin/nologin tightrank \
    && install -d -m 0700 -o tightrank -g tightrank /var/cache/tightrank /var/lib/tightrank \
    && install -d /etc/tightrank && ln -s /opt/tightrank/bin/tightrank /usr/local/bin/tightrank
ENV HOME=/var/cache/tightrank TORCHINDUCTOR_CACHE_DIR=/var/cache/tightrank/.cache/inductor
WORKDIR /var/cache/tightrank
USER tightrank
VOLUME ["/var/cache/tightrank", "/var/lib/tightrank"]
EXPOSE 8001 9470
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["/opt/tightrank/bin/python", "-I", "-S", "-B", "/opt/tightrank/health.py", "9470"]
# `up` becomes the guard, which does what an init does: it adopts and reaps whatever its tree leaves, forwards SIGTERM as a
# drain, and kills every process that is left before it ends. `docker run --init` all the same (compose.yaml says why).
ENTRYPOINT ["/opt/tightrank/bin/tightrank", "up"]
CMD ["-c", "/etc/tightrank/worker.yaml"]
COPY --from=supervisor /opt/tightrank /opt/tightrank
# Last, so that a new adapter replaces one layer of a few kilobytes on top of an image of many gigabytes.
COPY --from=adapter /opt/tightrank/adapter /opt/tightrank/adapter
