// Weight gradients into FP32: E5M2 x E4M3 with promoted accumulation.
#include "gemm.cuh"

namespace mfp8 {

static const Entry entries[] = {
    Tiled<E5M2, E4M3, FP32, 128, 256, 2, 1>::promoted<128, 128>(),
    Tiled<E5M2, E4M3, FP32, 128, 192, 2, 1>::promoted<128, 96, 2>(),
    Tiled<E5M2, E4M3, FP32, 128, 128, 2, 1>::promoted<128>(),
};

extern const Family e5m2_fp32 = family(entries);

}  // namespace mfp8
