// E4M3 x E4M3 with promoted accumulation, into BF16 and FP32.
#include "gemm.cuh"

namespace mfp8 {

static const Entry entries[] = {
    Tiled<E4M3, E4M3, BF16, 128, 256, 2, 1>::promoted<128, 128>(),
    Tiled<E4M3, E4M3, BF16, 128, 128, 2, 1>::promoted<128>(),
    Tiled<E4M3, E4M3, FP32, 128, 256, 2, 1>::promoted<128, 128>(),
};

extern const Family e4m3_promoted = family(entries);

}  // namespace mfp8
