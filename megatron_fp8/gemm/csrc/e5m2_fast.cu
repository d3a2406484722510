// E5M2 x E4M3; the tensor core sums all of K.
#include "gemm.cuh"

namespace mfp8 {

static const Entry entries[] = {
    Tiled<E5M2, E4M3, BF16, 128, 256, 2, 1>::fast(),
    Tiled<E5M2, E4M3, BF16, 128, 128, 2, 1>::fast_pingpong(),
};

extern const Family e5m2_fast = family(entries);

}  // namespace mfp8
