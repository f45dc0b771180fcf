# The course for JupyterHub and for Binder, which gives NB_USER and NB_UID. Alone, at the address that it prints:
# docker build -t course . && docker run --rm -p 127.0.0.1:8888:8888 course jupyter lab --ip=0.0.0.0
FROM debian:12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates iproute2 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/course
WORKDIR /opt/course
# The build of torch (cuda, where the hub's machines have GPUs), and the version of the hub
ARG TORCH=cpu
ARG JUPYTERHUB=6.1.1
RUN export PIP_NO_CACHE_DIR=1 \
    && python3 tools/setup.py --torch $TORCH \
    && .venv/bin/python -m pip install jupyterhub==$JUPYTERHUB \
    && .venv/bin/python -m compileall -q course_utils lessons tools
ENV PATH=/opt/course/.venv/bin:$PATH
ARG NB_USER=jovyan
ARG NB_UID=1000
RUN useradd --create-home --uid $NB_UID $NB_USER
USER $NB_USER
WORKDIR /home/$NB_USER
# Each start brings the copy in the home folder up to date and opens it; what the learner has changed there stays.
ENTRYPOINT ["sh", "-c", "python -m tools copy course; cd course; exec \"$@\"", "--"]
CMD ["jupyterhub-singleuser"]
