// E4M3 x E5M2, for products with a gradient on the right: one tile shape of each kind.
#include "gemm.cuh"

namespace mfp8 {

static const Entry entries[] = {
    Tiled<E4M3, E5M2, BF16, 128, 256, 2, 1>::fast(),
    Tiled<E4M3, E5M2, BF16, 128, 256, 2, 1>::promoted<128, 128>(),
    Tiled<E4M3, E5M2, FP32, 128, 256, 2, 1>::promoted<128, 128>(),
};

extern const Family e5m2_right = family(entries);

}  // namespace mfp8
