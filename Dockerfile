# snaprt in a virtual environment, with the compile cache on the volume /cache. In a checkout:
#
#   docker build -t snaprt .
#   docker build -t snaprt --build-arg BASE=ghcr.io/nvidia/jax:jax --build-arg JAX= .
#   docker build -t snaprt --build-arg 'JAX=jax[tpu]' .
#
# BASE needs Python 3.11 to 3.13 with venv; JAX is what pip installs, empty for the JAX of BASE.
ARG BASE=docker.io/library/python:3.12-slim
FROM ${BASE}
ARG JAX=jax

COPY . /src
# What BASE has installed stays visible, so that a JAX built for its drivers is the one that runs.
RUN python3 -m venv --system-site-packages /opt/snaprt \
    && /opt/snaprt/bin/python -m pip install --no-cache-dir '/src[demo,remote,stacks]' ${JAX} \
    && rm -r /src \
    && install -d -m 0700 /cache
ENV PATH=/opt/snaprt/bin:${PATH} \
    SNAPRT_CACHE_DIR=/cache
VOLUME /cache
ENTRYPOINT ["snaprt"]
CMD ["--help"]
