// Weight gradients into FP32: E5M2 x E4M3, promoted every 256 of K, and every 128 for comparison.
#include "gemm.cuh"

namespace mfp8 {

static const Entry entries[] = {
    Tiled<E5M2, E4M3, FP32, 128, 256, 2, 1>::promoted<256, 128>(),
    Tiled<E5M2, E4M3, FP32, 128, 128, 2, 1>::promoted<256>(),
    Tiled<E5M2, E4M3, FP32, 128, 256, 2, 1>::promoted<128, 128>(),
};

extern const Family e5m2_fp32 = family(entries);

}  // namespace mfp8
