// What the device's memory gives: reads two ranges once, as the encoder must.

typedef unsigned int u32;
typedef unsigned long long u64;

struct ReadArgs {
    u64 a, b;   // addresses, multiples of 16
    u64 chunks; // of 16 bytes, in each
    u64 sink;   // a word
};

template <int DEEP> __device__ __forceinline__ void read(const ReadArgs& args) {
    const uint4 *a = (const uint4*)args.a, *b = (const uint4*)args.b;
    u64 step = (u64)gridDim.x * blockDim.x * DEEP;
    u32 all = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x * DEEP + threadIdx.x; i < args.chunks; i += step) {
        uint4 x[DEEP], y[DEEP];
#pragma unroll
        for (int j = 0; j < DEEP; j++) {
            u64 at = i + (u64)j * blockDim.x;
            x[j] = y[j] = make_uint4(0, 0, 0, 0);
            if (at < args.chunks) {
                x[j] = __ldcs(a + at);
                y[j] = __ldcs(b + at);
            }
        }
#pragma unroll
        for (int j = 0; j < DEEP; j++) all ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w ^ y[j].x ^ y[j].y ^ y[j].z ^ y[j].w;
    }
    if (all == 0x5eed5eed) *(u32*)args.sink = all;
}

extern "C" __global__ void __launch_bounds__(256) read_2(ReadArgs args) { read<2>(args); }
extern "C" __global__ void __launch_bounds__(256) read_4(ReadArgs args) { read<4>(args); }
