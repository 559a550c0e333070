# docker build -t embodied . && docker run --rm --gpus all -v $PWD/outputs:/embodied/outputs embodied train.py task=quadrotor_hover
# Without --gpus it runs on the CPU. PyTorch's wheel brings its CUDA libraries.
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev libegl1 make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /embodied
# Packages first: a change of our own code does not install them again.
COPY Makefile pyproject.toml constraints.txt README.md LICENSE ./
COPY *.py ./
COPY configs configs
RUN mkdir embodied policies real_robot sims && make .venv/installed
COPY . .
RUN touch .venv/installed
ENTRYPOINT [".venv/bin/python"]
CMD ["train.py", "--help"]
