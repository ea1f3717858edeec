# The 8xH100 run in a container:
#
#     docker build -t speedrun .
#     docker run --rm --gpus all --ipc=host -v "$PWD/fineweb:/speedrun/data/fineweb10B" -v "$PWD/logs:/speedrun/logs" speedrun
#
# The data is fetched on the first run and stays in ./fineweb; logs stay in ./logs. What follows the image's name takes
# the place of ./run.sh: `speedrun ./run.sh --seed 7`, or `-it ... speedrun bash`.
#
# The pinned torch brings its own libraries of CUDA 13.0. The host needs a driver for CUDA 13 (580 or newer).
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# Python 3.12; the compiler and the headers are for Triton, which builds a launcher for its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /speedrun
COPY requirements.txt run.sh ./
RUN ./run.sh setup
COPY . .

# Both commands in one: python data/cached_fineweb10B.py 10
#                       torchrun --standalone --nproc_per_node=8 train_gpt.py
CMD ["./run.sh"]
