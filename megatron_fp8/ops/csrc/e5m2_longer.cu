// E5M2 x E4M3, promoted every 256 or 512 of K, into BF16: what a longer interval costs and gains is measured here.
#include "gemm.cuh"

namespace mfp8 {

static const Entry entries[] = {
    Tiled<E5M2, E4M3, BF16, 128, 256, 2, 1>::promoted<256, 128>(),
    Tiled<E5M2, E4M3, BF16, 128, 128, 2, 1>::promoted<256>(),
    Tiled<E5M2, E4M3, BF16, 128, 128, 2, 1>::promoted<512>(),
};

extern const Family e5m2_longer = family(entries);

}  // namespace mfp8
