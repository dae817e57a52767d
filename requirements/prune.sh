#!/usr/bin/env bash
# Take out of an environment what no rank loads, CUDA libraries most of all; the image is made smaller by it.
#
#   requirements/prune.sh SITE_PACKAGES
#
# Whatever torch's own libraries are linked against stays. `python -m mamba_fsdp doctor` says whether all works.
set -euo pipefail
cd "${1:?the folder site-packages of an environment}"
before=$(du -sm . | cut -f1)

# cuDNN 8 opens these when it is asked for a convolution or a recurrent layer of its own; the models have none.
rm -f nvidia/cudnn/lib/libcudnn_cnn_*.so.8 nvidia/cudnn/lib/libcudnn_adv_*.so.8
# torch opens these when it is asked to factor a matrix on a GPU.
rm -f torch/lib/libtorch_cuda_linalg.so nvidia/cusolver/lib/libcusolver*.so.*
# Other interfaces to the same libraries; counters that no profile of ours reads.
rm -f nvidia/cublas/lib/libnvblas.so.* nvidia/cufft/lib/libcufftw.so.*
rm -f nvidia/cuda_cupti/lib/libnvperf_*.so nvidia/cuda_cupti/lib/libpcsamplingutil.so nvidia/cuda_cupti/lib/libcheckpoint.so
# A disassembler, which Triton has for its developers.
rm -f triton/third_party/cuda/bin/nvdisasm triton/backends/nvidia/bin/nvdisasm
# To link against, to include from, to test with.
find . -name '*.a' -delete
rm -rf pyarrow/include torch/include torch/share
find torch/bin -type f ! -name torch_shm_manager -delete
# What makes TensorBoard's page load large logs faster; the page is looked at elsewhere.
rm -rf tensorboard_data_server
find . -type d -name tests -prune -exec rm -rf {} +
# Three quarters of Triton 2.2's library are symbols for a debugger.
if command -v strip > /dev/null; then find triton -name libtriton.so -exec strip --strip-unneeded {} +; fi

echo "pruned from $before MB to $(du -sm . | cut -f1) MB: $PWD"
