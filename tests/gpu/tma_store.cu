// Tests whether compute-sanitizer's initcheck sees the writes of a bulk tensor copy, which our CUTLASS kernels use.
//
//     nvcc -gencode=arch=compute_90a,code=sm_90a -o tma_store tests/gpu/tma_store.cu
//     compute-sanitizer --tool initcheck ./tma_store plain      then: ./tma_store tensor, and ./tma_store bulk
//
// One kernel fills a matrix, by plain stores, by a tensor map or by a bulk copy without one. Another reads every
// element. The program prints the sum and the right one. Nothing is read before it is written, so every report of
// initcheck is false.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

constexpr int ROWS = 64, COLUMNS = 64;  // one tile, one block

#define CHECK(call)                                                                        \
    if (cudaError_t error = (call); error != cudaSuccess) {                                \
        std::printf("%s: %s\n", #call, cudaGetErrorString(error));                         \
        return 1;                                                                          \
    }

__global__ void plain_stores(float* y) {
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) y[i] = float(i % 7);
}

template <bool TENSOR>
__global__ void bulk_store(const __grid_constant__ CUtensorMap map, float* y) {
    __shared__ alignas(128) float tile[ROWS * COLUMNS];
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) tile[i] = float(i % 7);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
        if constexpr (TENSOR)
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %1}], [%2];" ::"l"(&map), "r"(0),
                         "r"(from)
                         : "memory");
        else
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(y), "r"(from),
                         "r"(int(sizeof(tile)))
                         : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

__global__ void sum(const float* y, float* into) {
    float mine = 0;
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) mine += y[i];
    atomicAdd(into, mine);
}

int main(int argc, char** argv) {
    const char* how = argc > 1 ? argv[1] : "tensor";
    float *y = nullptr, *total = nullptr, found = 0, right = 0;
    CHECK(cudaMalloc(&y, ROWS * COLUMNS * sizeof(float)));
    CHECK(cudaMalloc(&total, sizeof(float)));
    CHECK(cudaMemset(total, 0, sizeof(float)));

    CUtensorMap map{};
    void* encode = nullptr;  // found by the runtime, so that the program is not linked with the driver
    cudaDriverEntryPointQueryResult there;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &there));
    cuuint64_t sizes[] = {COLUMNS, ROWS}, strides[] = {COLUMNS * sizeof(float)};
    cuuint32_t box[] = {COLUMNS, ROWS}, steps[] = {1, 1};
    auto encoded = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, y, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (encoded != CUDA_SUCCESS) {
        std::printf("cuTensorMapEncodeTiled: %d\n", int(encoded));
        return 1;
    }
    if (!std::strcmp(how, "plain"))
        plain_stores<<<1, 128>>>(y);
    else if (!std::strcmp(how, "bulk"))
        bulk_store<false><<<1, 128>>>(map, y);
    else
        bulk_store<true><<<1, 128>>>(map, y);
    CHECK(cudaGetLastError());
    sum<<<1, 128>>>(y, total);
    CHECK(cudaMemcpy(&found, total, sizeof(float), cudaMemcpyDeviceToHost));
    for (int i = 0; i < ROWS * COLUMNS; ++i) right += float(i % 7);
    std::printf("%s: sum %g, right %g\n", how, found, right);
    return found != right;
}
