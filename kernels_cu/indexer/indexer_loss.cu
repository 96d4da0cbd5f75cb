// The indexer's loss of each token, with the gradients of its queries and weights, and with what it contributes to the
// gradients of its keys. backward_lists.cu has sorted the token's list before; backward_rows.cu adds up contributions.
//
// For a token with queries Q [heads, D], weights w [heads] and the keys K of its list:
//
//   z = K.Q^T [keys, heads]          I = sum over heads of w * relu(z): the scores
//   loss = KL(target | softmax(I))   dI: its derivative by each score
//   bits: z > 0 (all of them set where the caller wants no relu)
//   U = (bits * dI)^T.K              dq = w * U,  dw = sum over columns of q * U
//   C = dI * (bits.(w * Q))          contributions to the keys' gradients
//
//   grid   x: token
//   CTA    8 warps; Q stands in shared memory. Twice through the list:
//
//     scores       I to memory, and a bit a key and head
//     divergence   both distributions, the loss, and dI, which takes the place of I
//     gradients    w * Q takes the place of Q. Tiles of keys, two in turn, with their dI and bits: U in registers, C
//                  to memory; behind the last tile dq and dw
//
// Each word on the left is a part under indexer_loss/. plan.cuh has what they share.
//
// Keys behind the list's end are zeros, and so are their dI. Sums have a fixed order, so a token's results depend on
// its own arguments only, bit for bit.
//
// QUANTIZED: Q and K are e4m3 numbers (round_rows.cu), with a scale a head and a scale a key. A head's scale is a
// factor of its weight wherever Q is multiplied. A key's scale is a factor of its score, and of the dI that U is made
// of: these are a second plane of dI.
//
// Shared memory, bytes: 256 HEADS of Q, 4 HEADS of weights; two tiles of TILE_KEYS * (256 of the key + 4 of dI) and 8
// HEADS of bits. 64 heads: 50,944; 128: 68,608. QUANTIZED: 4 HEADS of scales and 8 TILE_KEYS more.
#include "indexer/indexer_loss/divergence.cuh"
#include "indexer/indexer_loss/gradients.cuh"
#include "indexer/indexer_loss/scores.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) indexer_loss(const __grid_constant__ IndexerLossParams p) {
    const Token token = Token::of_cta(p);
    if (token.count > 0) {
        load_heads(p, token);
        __syncthreads();
        compare(p, token, find_scores(p, token));
    } else if (threadIdx.x == 0) {
        p.divergences[token.index] = 0.0f;
    }
    if (p.contributions == nullptr) return;
    HeadGradients u = {};  // stays 0 for a token without keys
    const int tiles = ceil_div(token.count, TILE_KEYS);
    if (tiles > 0) {
        weigh_queries();
        start_tile_copies(p, token, 0);
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait<0>();
        __syncthreads();  // the tile is there, and all have read the one before it
        if (tile + 1 < tiles) start_tile_copies(p, token, tile + 1);
        multiply_heads(tile, u);
        contribute(p, token, tile);
    }
    write_gradients(p, token, u);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
