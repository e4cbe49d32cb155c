# The gateway alone: no engine, no model, no GPU. BASE is any image with Python 3.11 or later and its venv module.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
COPY pyproject.toml scripts/requirements/supervisor.txt docker/environment.py /build/
RUN --mount=type=cache,target=/root/.cache/pip python3 /build/environment.py /opt/tightrank
COPY supervisor/tightrank /opt/tightrank/supervisor/tightrank
COPY docker/health.py /opt/tightrank/
COPY adapter/inject /opt/tightrank/adapter/inject
RUN /opt/tightrank/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/tightrank/supervisor

FROM ${BASE}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin tightrank
COPY --from=build /opt/tightrank /opt/tightrank
USER tightrank
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["/opt/tightrank/bin/python", "-I", "-S", "-B", "/opt/tightrank/health.py", "8000"]
# `docker run --init`: compose.yaml says why.
ENTRYPOINT ["/opt/tightrank/bin/tightrank", "gateway"]
