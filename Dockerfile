# The detector as a server. CPUs, about 1.5 GB, or NVIDIA GPUs, several GB, most of it torch:
#
#   docker build -t rtdetr .
#   docker build -t rtdetr:cuda --build-arg DEVICE=cuda .     # also --build-arg TORCH_CUDA_ARCH_LIST="8.6"
#
#   docker run -p 127.0.0.1:8000:8000 -v "$PWD/runs/mine:/weights:ro" rtdetr              # serves /weights/best.pth
#   docker run -p 127.0.0.1:8000:8000 -v "$PWD/runs/mine:/weights:ro" --gpus all rtdetr:cuda
#   docker run -v "$PWD:/data" -w /data -u "$(id -u)" rtdetr predict -w best.pth images/   # any other command
#
# For GPUs the host needs a driver for CUDA 13 and NVIDIA's container toolkit; nvcc is in the build stage alone.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ARG DEVICE=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
RUN case "$DEVICE" in \
      cpu) pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu ;; \
      cuda) pip install torch torchvision ;; \
      *) echo "DEVICE: expected cpu or cuda, got $DEVICE" >&2; exit 1 ;; \
    esac

FROM base AS build
ARG DEVICE=cpu
ARG TORCH_CUDA_ARCH_LIST="7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install "setuptools>=77" wheel ninja \
    && if [ "$DEVICE" = cuda ]; then pip install "cuda-toolkit[nvcc,cccl]>=13"; fi
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE NOTICE ./
COPY configs configs
COPY rtdetr rtdetr
RUN if [ "$DEVICE" = cuda ]; then export RTDETR_CUDA=1; else export RTDETR_CUDA=0; fi \
    && pip wheel --no-deps --no-build-isolation -w /wheels .

FROM base
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install "$(echo /wheels/rtdetr-*.whl)[serve]" && python -m rtdetr.ops
RUN useradd --create-home rtdetr
USER rtdetr
WORKDIR /home/rtdetr
EXPOSE 8000
HEALTHCHECK --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=3)"]
# In a container 0.0.0.0 is what `docker run -p` publishes, and nothing more. SIGTERM (docker stop) answers what was let
# in; it needs more than Docker's ten seconds (docker stop -t) only where 64 images take longer.
ENTRYPOINT ["rtdetr"]
CMD ["serve", "-w", "/weights/best.pth", "--host", "0.0.0.0"]
