// Forward: E4M3 x E4M3; the tensor core sums all of K.
#include "gemm.cuh"

namespace mfp8 {

static const Entry entries[] = {
    Tiled<E4M3, E4M3, BF16, 128, 256, 2, 1>::fast(),
    Tiled<E4M3, E4M3, BF16, 128, 192, 2, 1>::fast_pingpong(),
    Tiled<E4M3, E4M3, BF16, 128, 128, 2, 1>::fast_pingpong(),
};

extern const Family e4m3_fast = family(entries);

}  // namespace mfp8
